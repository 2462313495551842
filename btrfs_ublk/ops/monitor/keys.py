"""Keys that are typed while a table is shown."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def keys(quit_keys: bytes = b"qQ") -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for some seconds, and returns True as soon as one of
    ``quit_keys`` is typed. Without a terminal, it only waits.
    """
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, AttributeError, termios.error):
        yield _wait_only
        return

    def wait(seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not select.select([fd], [], [], left_s)[0]:
                return False
            typed = os.read(fd, 64)
            if not typed:  # the end of the input
                return _wait_only(max(0.0, deadline_s - time.monotonic()))
            if any(key in quit_keys for key in typed):
                return True
        return False

    tty.setcbreak(fd, termios.TCSANOW)
    try:
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def _wait_only(seconds: float) -> bool:
    time.sleep(seconds)
    return False
