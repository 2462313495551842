"""Verifying clones: their content, and the extents that they share.

Before a seed is mounted, the virtual data of some files of a plan is stamped: the first
and the last whole 8 bytes contain their own offset in the virtual file. A clone of
other data cannot have these numbers.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.bench.files import PlannedFile
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.physmap import ContiguousRun, PhysicalMap
from btrfs_ublk.seed import Seed
from btrfs_ublk.units import BLOCK_BYTES

_STAMP = struct.Struct("<Q")

# linux/fiemap.h: struct fiemap (start, length, flags, mapped, count), fiemap_extent
# (logical, physical, length, flags).
_FS_IOC_FIEMAP = 0xC020660B
_FIEMAP = struct.Struct("=QQIII4x")
_EXTENT = struct.Struct("=QQQ16xI12x")
_EXTENTS = 16

#: (offset in the file, btrfs' logical address, length)
Piece = tuple[int, int, int]


def _stamp_offsets(file: PlannedFile) -> Iterator[int]:
    """Yield the offsets of a file's stamps."""
    yield 0
    yield (file.size // _STAMP.size - 1) * _STAMP.size


def stamp(seed: Seed, files: Iterable[PlannedFile]) -> None:
    """Write the stamps into the image of a seed that is not mounted."""
    start = seed.virtual_data.device_offset
    with seed.path.open("r+b", buffering=0) as image:
        for file in files:
            for inner in _stamp_offsets(file):
                offset = file.offset + inner
                os.pwrite(image.fileno(), _STAMP.pack(offset), start + offset)


def pieces(fd: int, offset: int, length: int) -> list[Piece]:
    """Return where [offset, offset + length) of a file is (FIEMAP). The pieces' offsets
    are relative to ``offset``; adjacent pieces are joined.
    """
    request = bytearray(_FIEMAP.size + _EXTENTS * _EXTENT.size)
    _FIEMAP.pack_into(request, 0, offset, length, 0, 0, _EXTENTS)
    fcntl.ioctl(fd, _FS_IOC_FIEMAP, request)
    found: list[Piece] = []
    for number in range(_FIEMAP.unpack_from(request)[3]):
        start, address, size, _flags = _EXTENT.unpack_from(
            request, _FIEMAP.size + number * _EXTENT.size
        )
        # btrfs reports whole extents, even when less was asked for.
        begin, end = max(start, offset), min(start + size, offset + length)
        found.append((begin - offset, address + begin - start, end - begin))
    return joined(found)


def joined(found: Iterable[Piece]) -> list[Piece]:
    """Join pieces that are adjacent in file and address."""
    result: list[Piece] = []
    for piece in found:
        if result:
            begin, address, length = result[-1]
            if piece[:2] == (begin + length, address + length):
                result[-1] = (begin, address, length + piece[2])
                continue
        result.append(piece)
    return result


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    with open(path, "rb", buffering=0) as file:
        # Only the stamps are wanted, not the data around them.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        yield file.fileno()


def verify(
    virtual_file: Path, clones: Iterable[tuple[Path, PlannedFile]]
) -> dict[str, int]:
    """Verify size, content and extents of clones whose virtual data was stamped. Raises
    BtrfsUblkError for the first wrong one. Returns counts for a result.
    """
    count = stamps = 0
    with _opened(virtual_file) as source:
        for path, file in clones:
            with _opened(path) as clone:
                stamps += _verify_one(source, clone, path, file)
            count += 1
    return {"verified_clones": count, "verified_stamps": stamps}


def _verify_one(source: int, clone: int, path: Path, file: PlannedFile) -> int:
    size = os.fstat(clone).st_size
    if size != file.size:
        raise BtrfsUblkError(f"{path} has {size} bytes, not {file.size}")
    length = -(-size // BLOCK_BYTES) * BLOCK_BYTES
    wanted, found = pieces(source, file.offset, length), pieces(clone, 0, length)
    if found != wanted or sum(piece[2] for piece in found) != length:
        raise BtrfsUblkError(
            f"{path} has the extents {found}; offset {file.offset} of the virtual "
            f"data has {wanted}"
        )
    stamps = list(_stamp_offsets(file))
    for inner in stamps:
        data = os.pread(clone, _STAMP.size, inner)
        if data != _STAMP.pack(file.offset + inner):
            raise BtrfsUblkError(
                f"{path} has {data.hex()} at {inner}, which is not virtual data from "
                f"offset {file.offset}"
            )
    return len(stamps)


def verify_physical(
    virtual_start: int, clones: Iterable[tuple[Path, PlannedFile]]
) -> dict[str, int]:
    """Verify the physical maps of clones; ``virtual_start`` is where the virtual data
    begins on the device. Raises MappingError or BtrfsUblkError.
    """
    count = 0
    for path, file in clones:
        mapping = PhysicalMap.read(path)
        mapping.assert_all_regular()
        mapping.assert_single_device()
        length = -(-file.size // BLOCK_BYTES) * BLOCK_BYTES
        wanted = ContiguousRun(0, virtual_start + file.offset, length)
        found = mapping.largest_contiguous_run()
        if found != wanted:
            raise BtrfsUblkError(f"{path} is mapped to {found}, not {wanted}")
        count += 1
    return {"verified_maps": count}
