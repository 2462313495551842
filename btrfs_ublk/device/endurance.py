"""Keep a supervisor working while its own device does not answer.

The root file system may be on the device, or memory may be short and only a write to
the device would free some. So the next server must start without reading any file: this
process is locked into memory, and so are the files of the server's program. Because of
that, it looks large to the OOM killer. But all readers of the device depend on it, so
the OOM killer is told to take others first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

from btrfs_ublk.base.log import log

# linux/mman.h, linux/prctl.h
_MCL_CURRENT = 1
_MCL_FUTURE = 2
_PR_SET_IO_FLUSHER = 57

#: The dynamic linker reads these besides the libraries (ld.so(8)).
_LINKER_FILES = ("/etc/ld.so.cache",)

_OOM_SCORE = Path("/proc/self/oom_score_adj")
#: The systemd units have the same value. Servers inherit it. -1000 would spare even a
#: process that leaks memory.
_OOM_SCORE_ADJ = -900

_libc = ctypes.CDLL(None, use_errno=True)

#: Maps of files, by path, which are kept until this process ends.
_pinned: dict[str, mmap.mmap] = {}


def stay_in_memory() -> None:
    """Lock this process into memory, never wait for I/O to free memory, and make the
    OOM killer choose others first. What is not allowed is logged and skipped."""
    if _libc.mlockall(_MCL_CURRENT | _MCL_FUTURE):
        log.warning(
            "cannot lock memory (%s): this must not run from what the device backs",
            os.strerror(ctypes.get_errno()),
        )
    if _libc.prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0):
        log.info("no CAP_SYS_RESOURCE, so no PR_SET_IO_FLUSHER")
    _avoid_oom_killer()


def _avoid_oom_killer() -> None:
    # Somebody may have set a lower value already.
    try:
        if int(_OOM_SCORE.read_text()) > _OOM_SCORE_ADJ:
            _OOM_SCORE.write_text(str(_OOM_SCORE_ADJ))
    except OSError as error:
        log.info("%s stays as it is: %s", _OOM_SCORE, error.strerror)


def pin_program_of(pid: int) -> int:
    """Keep the program and libraries of process ``pid`` in the page cache, so that it
    can be started again without reading any file. Returns how many bytes are pinned.

    NB: the open maps also pin the names of the files: the kernel does not drop dentries
    of files in use, nor of the directories above.
    """
    paths: set[str] = set(_LINKER_FILES)
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            # address perms offset dev inode path (proc_pid_maps(5))
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                paths.add(fields[5])
    for path in paths - _pinned.keys():
        with suppress(OSError, ValueError):
            with open(path, "rb") as file:
                # MCL_FUTURE locks it at once; one map serves all supervisors.
                _pinned[path] = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
                )
    return sum(len(pinned) for pinned in _pinned.values())
