"""Waiting for kernel events, with and without them."""

import socket
import threading
import time

import pytest

from btrfs_ublk.kernel import uevents
from btrfs_ublk.kernel.uevents import wait_until


def test_the_deadline_is_kept_and_says_what_was_awaited() -> None:
    start_s = time.monotonic()
    with pytest.raises(TimeoutError, match="the thing: it did not happen within 0.3 s"):
        wait_until(lambda: None, timeout_s=0.3, what="the thing")
    assert 0.25 < time.monotonic() - start_s < 30


def test_without_netlink_the_condition_is_still_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_arguments: object) -> socket.socket:
        raise PermissionError

    monkeypatch.setattr(uevents.socket, "socket", refuse)
    happened = threading.Event()
    threading.Timer(0.1, happened.set).start()
    assert wait_until(happened.is_set, timeout_s=10, what="the timer")
