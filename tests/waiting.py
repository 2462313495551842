"""Waits for what happens at some time, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

_POLL_S = 0.02


def wait_until(condition: Callable[[], object], *, timeout_s: float = 60) -> None:
    """Wait until the condition is true; fail after ``timeout_s`` seconds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it has not happened in time"
        time.sleep(_POLL_S)
