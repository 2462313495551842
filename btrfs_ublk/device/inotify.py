"""Wait for a directory to change, by inotify(7), which Python does not offer."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from btrfs_ublk.base.process import readable

T = TypeVar("T")

# sys/inotify.h
_IN_MOVED_FROM = 0x40
_IN_MOVED_TO = 0x80
_IN_CLOEXEC = os.O_CLOEXEC
_IN_NONBLOCK = os.O_NONBLOCK

#: Changes that are not in the directory (a process that ended) are seen this late.
_RECHECK_S = 0.1

_libc = ctypes.CDLL(None, use_errno=True)


def wait_for_change(
    directory: Path, condition: Callable[[], T | None], *, timeout_s: float
) -> T | None:
    """Call ``condition`` whenever a file is moved into ``directory`` or out of it, and
    return its first true value; None after ``timeout_s`` seconds.

    Without inotify (if there are no more instances), it is called each tenth of a
    second.
    """
    deadline_s = time.monotonic() + timeout_s
    fd: int = _libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
    fds = [fd] if fd >= 0 else []
    try:
        for fd in fds:
            _libc.inotify_add_watch(
                fd, os.fsencode(directory), _IN_MOVED_FROM | _IN_MOVED_TO
            )
        while True:
            value = condition()
            remaining_s = deadline_s - time.monotonic()
            if value or remaining_s <= 0:
                return value or None
            readable(fds, timeout_s=min(remaining_s, _RECHECK_S))
            for fd in fds:
                with suppress(OSError):
                    os.read(fd, 65536)
    finally:
        for fd in fds:
            os.close(fd)
