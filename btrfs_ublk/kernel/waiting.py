"""Wait until something of the kernel has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Pauses double, from the first to the longest: most changes come at once.
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05


def wait_until(condition: Callable[[], T | None], *, timeout_s: float, what: str) -> T:
    """Call ``condition`` again and again, and return its first true value.

    Raises TimeoutError, which names ``what``, after ``timeout_s`` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        value = condition()
        if value:
            return value
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(f"{what}: it did not happen within {timeout_s:g} s")
        time.sleep(min(pause_s, remaining_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
