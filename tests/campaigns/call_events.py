"""Counts system calls of a process, and has the kernel send it a signal at one of them.

By perf events at tracepoints, perf_event_open(2). They cost the process nothing, while
strace stops it twice at every call; a machine that has much to do takes long to go on.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from btrfs_ublk.base.capabilities import Probed
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.temporary import tempdir

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
#: struct perf_event_attr, as it was at first (PERF_ATTR_SIZE_VER0): type, size, config,
#: sample_period, sample_type, read_format, flags, wakeup_events, bp_type, config1.
_ATTRIBUTES = struct.Struct("=IIQQQQQIIQ")
_TYPE_TRACEPOINT = 2
_FLAG_DISABLED = 1
_FLAG_FD_CLOEXEC = 8
_IOC_ENABLE, _IOC_REFRESH = 0x2400, 0x2402
#: Tracepoints are called as the functions of the kernel are.
_OTHERWISE = {"umount2": "umount"}

_libc = ctypes.CDLL(None, use_errno=True)


def _probe() -> str | None:
    try:
        with CallEvent(os.getpid(), tracepoints(("close",))["close"]):
            return None
    except KeyError:
        return "the kernel has no tracepoints of system calls"
    except (OSError, BtrfsUblkError) as error:
        return str(error)


CALL_EVENTS = Probed(
    "perf events at system calls",
    "as root, use a kernel that has CONFIG_PERF_EVENTS and CONFIG_FTRACE_SYSCALLS",
    _probe,
)


@lru_cache
def tracepoints(names: Iterable[str]) -> Mapping[str, int]:
    """Return the numbers of the tracepoints at the beginning of these system calls, of
    those that there are. Raises OSError when the kernel has no tracefs."""
    found = {}
    with tempdir() as top, mounted("none", top, fs_type="tracefs"):
        for name in names:
            event = f"events/syscalls/sys_enter_{_OTHERWISE.get(name, name)}/id"
            if (path := Path(top, event)).exists():
                found[name] = int(path.read_text())
    return found


class CallEvent:
    """Counts a process's calls from now on, by the number of their tracepoint; those of
    its first thread, and of no child. A context manager.

    When there have been ``at`` of them, ``number`` is sent to the process ``to``, or to
    the group ``-to``, as that call begins. It is still done, unless it waits.
    """

    def __init__(
        self, pid: int, tracepoint: int, *, at: int = 0, to: int = 0, number: int = 0
    ) -> None:
        attributes = _ATTRIBUTES.pack(
            *(_TYPE_TRACEPOINT, _ATTRIBUTES.size, tracepoint, at, 0, 0),
            *(_FLAG_DISABLED, 0, 0, 0),
        )
        self._at = at
        self._fd = _libc.syscall(
            *(_PERF_EVENT_OPEN[platform.machine()], attributes, pid, -1, -1),
            ctypes.c_ulong(_FLAG_FD_CLOEXEC),
        )
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"perf_event_open: {os.strerror(error)}")
        if at == 0:
            fcntl.ioctl(self._fd, _IOC_ENABLE, 0)
            return
        fcntl.fcntl(self._fd, fcntl.F_SETOWN, to)
        fcntl.fcntl(self._fd, fcntl.F_SETSIG, number)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_ASYNC)
        fcntl.ioctl(self._fd, _IOC_REFRESH, 1)  # Enable it, for one signal.

    def __enter__(self) -> CallEvent:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._fd)

    @property
    def count(self) -> int:
        """How many calls there were so far; not more than those until the signal."""
        return int.from_bytes(os.read(self._fd, 8), "little")

    @property
    def sent(self) -> bool:
        return 0 < self._at <= self.count
