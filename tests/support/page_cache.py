"""What the page cache has of a file."""

import ctypes
import os
from pathlib import Path

_CACHESTAT = 451  # of all architectures


def resident_bytes(path: Path) -> int:
    """Return how much of the file is in memory, by cachestat(2), of Linux 6.5."""
    libc = ctypes.CDLL(None, use_errno=True)
    whole = (ctypes.c_uint64 * 2)(0, 0)  # offset and length; 0: to the end
    found = (ctypes.c_uint64 * 5)()  # pages in memory, dirty, written, evicted
    with path.open("rb") as file:
        if libc.syscall(_CACHESTAT, file.fileno(), whole, found, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    return int(found[0]) * os.sysconf("SC_PAGE_SIZE")
