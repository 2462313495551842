"""Wait for a directory to change, by inotify(7), which Python does not offer."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
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


class DirectoryWatch:
    """Waits until a file is moved into one of some directories, or out of it.

    Without inotify (if there are no more instances), each wait takes its full time. Use
    it in a ``with`` block.
    """

    def __init__(self) -> None:
        fd: int = _libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
        self._fds = [fd] if fd >= 0 else []

    def __enter__(self) -> DirectoryWatch:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def add(self, directories: Iterable[Path]) -> None:
        """Also watch these directories. Those that are watched already stay so, and
        those that do not exist are skipped."""
        for fd in self._fds:
            for directory in directories:
                _libc.inotify_add_watch(
                    fd, os.fsencode(directory), _IN_MOVED_FROM | _IN_MOVED_TO
                )

    def wait(self, timeout_s: float) -> None:
        """Return after a change since the last call, or ``timeout_s`` seconds."""
        readable(self._fds, timeout_s=timeout_s)
        for fd in self._fds:
            with suppress(OSError):
                os.read(fd, 65536)


def wait_for_change(
    directory: Path,
    condition: Callable[[], T | None],
    *,
    timeout_s: float,
) -> T | None:
    """Call ``condition`` whenever a file is moved into ``directory`` or out of it, and
    return its first true value; None after ``timeout_s`` seconds."""
    deadline_s = time.monotonic() + timeout_s
    with DirectoryWatch() as watch:
        watch.add([directory])
        while True:
            value = condition()
            remaining_s = deadline_s - time.monotonic()
            if value or remaining_s <= 0:
                return value or None
            watch.wait(min(remaining_s, _RECHECK_S))
