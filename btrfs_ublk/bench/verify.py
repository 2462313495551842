"""Verifying clones: their content, and the extents that they share.

Before a seed is mounted, the virtual data of some files of a plan is stamped: the first
and the last whole 8 bytes contain their own offset in the virtual file. A clone of
other data cannot have these numbers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from btrfs_ublk.bench.files import PlannedFile
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.physmap import ContiguousRun, PhysicalMap
from btrfs_ublk.seed import Seed
from btrfs_ublk.units import BLOCK_BYTES

_STAMP = struct.Struct("<Q")


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


def verify(clones: Iterable[tuple[Path, PlannedFile]]) -> dict[str, int]:
    """Verify size and content of clones whose virtual data was stamped. Raises
    BtrfsUblkError for the first wrong one. Returns counts for a result.
    """
    count = stamps = 0
    for path, file in clones:
        with path.open("rb", buffering=0) as clone:
            stamps += _verify_one(clone.fileno(), path, file)
        count += 1
    return {"verified_clones": count, "verified_stamps": stamps}


def _verify_one(clone: int, path: Path, file: PlannedFile) -> int:
    size = os.fstat(clone).st_size
    if size != file.size:
        raise BtrfsUblkError(f"{path} has {size} bytes, not {file.size}")
    # Only the stamps are wanted, not the data around them.
    os.posix_fadvise(clone, 0, 0, os.POSIX_FADV_RANDOM)
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
