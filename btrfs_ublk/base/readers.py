"""Read a range of a file through the page cache or past it; for checks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from btrfs_ublk.units import BLOCK_BYTES

#: ``read(path, offset, length)``; raises OSError, and EOFError when the file ends.
Reader = Callable[[Path, int, int], bytes]


def read_buffered(path: Path, offset: int, length: int) -> bytes:
    """Read with pread(2), after dropping what the page cache holds of the file."""
    with path.open("rb", buffering=0) as file:
        _forget(file.fileno())
        return _pread(file.fileno(), offset, length)


def read_direct(path: Path, offset: int, length: int) -> bytes:
    """Read whole blocks with O_DIRECT, and cut the range out of them."""
    start = offset // BLOCK_BYTES * BLOCK_BYTES
    end = -(-(offset + length) // BLOCK_BYTES) * BLOCK_BYTES
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        # An anonymous map is page-aligned, as buffers for O_DIRECT must be.
        with mmap.mmap(-1, end - start) as buffer:
            done = 0
            while done < end - start:
                with memoryview(buffer) as view, view[done:] as rest:
                    got = os.preadv(fd, [rest], start + done)
                if got == 0:
                    break
                done += got
            if start + done < offset + length:
                raise EOFError(f"{path} ends at {start + done}")
            return buffer[offset - start : offset - start + length]
    finally:
        os.close(fd)


def read_mapped(path: Path, offset: int, length: int) -> bytes:
    """Read with mmap(2), after dropping what the page cache holds of the file.

    NB: where the data cannot be read, the kernel ends this process with SIGBUS.
    """
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < offset + length:
            raise EOFError(f"{path} ends before {offset + length}")
        _forget(file.fileno())
        size = offset + length - start
        with mmap.mmap(
            file.fileno(), size, prot=mmap.PROT_READ, offset=start
        ) as memory:
            return memory[offset - start : size]


READERS: dict[str, Reader] = {
    "direct": read_direct,
    "buffered": read_buffered,
    "mmap": read_mapped,
}


def _forget(fd: int) -> None:
    # NB: for a range, the kernel would not drop folios that are only partly in it.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _pread(fd: int, offset: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.pread(fd, length, offset)
        if not part:
            raise EOFError(f"the file ends at {offset}")
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)
