"""Waits for what happens at some time, with a bound."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: What takes longer hangs, however busy the machine is.
DEADLINE_S = 60
_POLL_S = 0.01


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], object] = "what was waited for has not happened",
    *,
    timeout_s: float = DEADLINE_S,
) -> T:
    """Wait until the condition is true, and return its value.

    Fails after ``timeout_s`` seconds, with ``what`` has not happened, or with what that
    returns: the state that is there in its place.
    """
    end_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            seen = what if isinstance(what, str) else what()
            raise AssertionError(f"after {timeout_s} s: {seen}")
        time.sleep(_POLL_S)
    return value
