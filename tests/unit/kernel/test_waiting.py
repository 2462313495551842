"""Waiting for a state, with a deadline."""

import threading
import time

import pytest

from btrfs_ublk.kernel.waiting import wait_until


def test_the_deadline_is_kept_and_says_what_was_awaited() -> None:
    start_s = time.monotonic()
    with pytest.raises(TimeoutError, match="the thing: it did not happen within 0.3 s"):
        wait_until(lambda: None, timeout_s=0.3, what="the thing")
    assert 0.25 < time.monotonic() - start_s < 30


def test_the_first_true_value_is_returned() -> None:
    happened = threading.Event()
    threading.Timer(0.1, happened.set).start()
    assert wait_until(happened.is_set, timeout_s=10, what="the timer")
