"""Waiting for a directory to change: inotify(7), which Python does not have."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from btrfs_ublk.process import readable

T = TypeVar("T")

# sys/inotify.h
_IN_MOVED_TO = 0x80
_IN_CLOEXEC = os.O_CLOEXEC
_IN_NONBLOCK = os.O_NONBLOCK

#: How long what leaves no trace in the directory (a process that ended) goes unseen.
_RECHECK_S = 0.1

_libc = ctypes.CDLL(None, use_errno=True)


def wait_for_change(
    directory: Path,
    condition: Callable[[], T | None],
    *,
    timeout_s: float,
) -> T | None:
    """The first true value of ``condition``, which is asked again whenever a file was
    moved into ``directory``; None after ``timeout_s`` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    fd: int = _libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
    try:
        if fd >= 0:
            _libc.inotify_add_watch(fd, os.fsencode(directory), _IN_MOVED_TO)
        while True:
            value = condition()
            remaining_s = deadline_s - time.monotonic()
            if value or remaining_s <= 0:
                return value or None
            # Without inotify (out of instances), it is asked again all the same.
            channels = [fd] if fd >= 0 else []
            readable(channels, timeout_s=min(remaining_s, _RECHECK_S))
            with suppress(OSError):
                os.read(fd, 65536)
    finally:
        if fd >= 0:
            os.close(fd)
