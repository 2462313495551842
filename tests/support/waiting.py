"""Waits for what happens at some time, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

_POLL_S = 0.02


def wait_until(condition: Callable[[], object], *, timeout_s: float = 60) -> None:
    """Wait until the condition is true; fail after ``timeout_s`` seconds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it has not happened in time"
        time.sleep(_POLL_S)


def in_some_round(check: Callable[[int], None], *, rounds: int = 4) -> None:
    """Run check(1), and while it fails check(2), check(4), check(8): all its times are
    to be that many times as long. A machine that stands still for a while misses short
    ones; what is wrong fails each round.
    """
    for number in range(rounds - 1):
        with suppress(AssertionError):
            return check(1 << number)
    return check(1 << (rounds - 1))
