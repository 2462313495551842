"""What keeps a supervisor going while its own device answers nothing.

It may be that the root file system stands on the device, or that memory is short and
only writing to the device would free some. So nothing that is needed to bring up the
next server may have to be read then: this process is locked into memory, and so are the
files that a server is made of. To the OOM killer, what is locked looks large, but all
who read wait for it: others are to go first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

from btrfs_ublk.log import log

# linux/mman.h, linux/prctl.h
_MCL_CURRENT = 1
_MCL_FUTURE = 2
_PR_SET_IO_FLUSHER = 57

#: What the dynamic linker reads besides the libraries (ld.so(8)).
_LINKER_FILES = ("/etc/ld.so.cache",)

_OOM_SCORE = Path("/proc/self/oom_score_adj")
#: As the units have it; servers inherit it. -1000 would spare even one that leaks.
_OOM_SCORE_ADJ = -900

_libc = ctypes.CDLL(None, use_errno=True)

#: Maps of files, by path, that stay for as long as this process.
_pinned: dict[str, mmap.mmap] = {}


def stay_in_memory() -> None:
    """Lock this process into memory, never wait for I/O to free some, and have the OOM
    killer take others first. What is not allowed, is said and left.
    """
    if _libc.mlockall(_MCL_CURRENT | _MCL_FUTURE):
        log.warning(
            "cannot lock memory (%s): this must not run from what the device backs",
            os.strerror(ctypes.get_errno()),
        )
    if _libc.prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0):
        log.info("no CAP_SYS_RESOURCE, so no PR_SET_IO_FLUSHER")
    _avoid_oom_killer()


def _avoid_oom_killer() -> None:
    # Somebody may have made it lower already.
    try:
        if int(_OOM_SCORE.read_text()) > _OOM_SCORE_ADJ:
            _OOM_SCORE.write_text(str(_OOM_SCORE_ADJ))
    except OSError as error:
        log.info("%s stays as it is: %s", _OOM_SCORE, error.strerror)


def pin_program_of(pid: int) -> int:
    """Keep what process ``pid`` is made of, program and libraries, in the page cache,
    so that another one can be started without reading any file. Bytes that are pinned.

    NB: the open maps pin the names of the files as well: dentries of what is in use are
    not dropped, and neither are those of the directories above.
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
                # Locked at once, as MCL_FUTURE says; and once for all supervisors.
                _pinned[path] = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
                )
    return sum(len(pinned) for pinned in _pinned.values())
