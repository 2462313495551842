"""The content of what benchmarks read, and the check of it.

Peers are filled with STAMPS. A run of the matrix reads a clone, which has a quarter
from the start of the virtual data, half of it from around the middle, and a quarter
from the end. These are the sources of the data:

memset    one repeated byte, the cheapest source; does not show positions
pattern   each 8 bytes contain their own position, so that misplaced blocks are noticed
"""

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from btrfs_ublk.base.readers import Reader
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError
from btrfs_ublk.kernel.reflink import clone_range, match_checksums
from btrfs_ublk.server import MemsetSegment, PatternSegment, Segment
from btrfs_ublk.units import BLOCK_BYTES, MIB, format_size

_WORD_BYTES = 8
_SEED = 20261120

BYTE = ord("a")

#: The sizes read at each place: parts of a block, blocks, more than one request.
CHECK_SIZES = (1, 511, BLOCK_BYTES, 3 * BLOCK_BYTES + 1, 64 << 10, MIB)
#: Places as shares of the clone: its ends, and the seams between its pieces.
CHECK_PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Content(Protocol):
    """The bytes that should be read. Segments of a description have this method."""

    def content(self, offset: int, length: int) -> bytes:
        """Return the bytes of [offset, offset + length)."""


class Stamps:
    """Repeated random bytes, except that each block begins with its offset in 8 bytes.

    They are random, so that nothing can compress them.
    """

    def content(self, offset: int, length: int) -> bytes:
        start = offset // BLOCK_BYTES * BLOCK_BYTES
        end = -(-(offset + length) // BLOCK_BYTES) * BLOCK_BYTES
        data = bytearray()
        while start + len(data) < end:
            within = (start + len(data)) % MIB
            data += _noise()[within : within + end - start - len(data)]
        for position in range(0, end - start, BLOCK_BYTES):
            stamp = (start + position).to_bytes(_WORD_BYTES, "little")
            data[position : position + _WORD_BYTES] = stamp
        return bytes(data[offset - start :][:length])


@cache
def _noise() -> bytes:
    return random.Random(_SEED).randbytes(MIB)


STAMPS = Stamps()


def write_content(path: Path, content: Content, size_bytes: int) -> None:
    """Fill a new file, or a block device, from its start. Afterwards it is on the
    medium, and no longer in the page cache.
    """
    with path.open("r+b" if path.exists() else "xb", buffering=0) as file:
        for offset in range(0, size_bytes, MIB):
            piece = content.content(offset, min(MIB, size_bytes - offset))
            if file.write(piece) != len(piece):
                raise BtrfsUblkError(f"{path} takes no more than {file.tell()} bytes")
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class WrongDataError(BtrfsUblkError):
    """A byte was not as expected."""


def check(
    path: Path, content: Content, ranges: Iterable[tuple[int, int]], read: Reader
) -> int:
    """Read ranges, offset and length, and compare them with the content; returns their
    number. Raises WrongDataError for the first wrong byte, OSError for what cannot be
    read.
    """
    count = 0
    for offset, length in ranges:
        found, wanted = read(path, offset, length), content.content(offset, length)
        count += 1
        if found == wanted:
            continue
        wrong = first_difference(found, wanted)
        raise WrongDataError(
            f"wrong data: byte {offset + wrong} is "
            f"{found[wrong : wrong + 1].hex() or 'missing'}, not "
            f"{wanted[wrong : wrong + 1].hex()} (read of {length} at {offset})"
        )
    return count


def check_blocks(
    path: Path,
    content: Content,
    size_bytes: int,
    *,
    read: Reader,
    samples: int,
    chances: random.Random,
) -> None:
    """Check the first block, the last one, and ``samples`` others."""
    blocks = size_bytes // BLOCK_BYTES
    chosen = [0, blocks - 1, *(chances.randrange(blocks) for _ in range(samples))]
    ranges = [(block * BLOCK_BYTES, BLOCK_BYTES) for block in chosen]
    check(path, content, ranges, read)


def first_difference(one: bytes, other: bytes) -> int:
    """Return the index of the first byte that differs; if one begins with the other,
    the length of the shorter.
    """
    for index, (left, right) in enumerate(zip(one, other)):
        if left != right:
            return index
    return min(len(one), len(other))


@dataclass(frozen=True)
class Piece:
    """A range of a clone and its place in the virtual data; bytes, in whole blocks."""

    offset: int
    virtual_offset: int
    size_bytes: int


def clone_pieces(*, virtual_data_bytes: int, clone_bytes: int) -> list[Piece]:
    """Return the pieces in order; none overlap in the virtual data."""
    quarter = clone_bytes // 4 // BLOCK_BYTES * BLOCK_BYTES
    half = clone_bytes - 2 * quarter
    middle = (virtual_data_bytes - half) // 2 // BLOCK_BYTES * BLOCK_BYTES
    return [
        Piece(0, 0, quarter),
        Piece(quarter, middle, half),
        Piece(quarter + half, virtual_data_bytes - quarter, quarter),
    ]


def make_clone(virtual_file: Path, path: Path, pieces: Sequence[Piece]) -> None:
    """Clone the pieces into a new file, without moving data. Raises BtrfsUblkError."""
    with path.open("xb", buffering=0) as file:
        match_checksums(virtual_file, file.fileno())
        for piece in pieces:
            clone_range(
                virtual_file,
                file.fileno(),
                source_offset=piece.virtual_offset,
                length_bytes=piece.size_bytes,
                target_offset=piece.offset,
            )


@dataclass(frozen=True)
class Contents:
    """A clone's content: the segment that is served, with offsets in the virtual file,
    and what is cloned of it.
    """

    served: Segment
    pieces: Sequence[Piece]

    def content(self, offset: int, length: int) -> bytes:
        """Return the bytes that a range of the clone must have."""
        parts = []
        end = offset + length
        for piece in self.pieces:
            start = max(offset, piece.offset)
            stop = min(end, piece.offset + piece.size_bytes)
            shift = piece.virtual_offset - piece.offset
            if start < stop:
                parts.append(self.served.content(start + shift, stop - start))
        return b"".join(parts)


def make_contents(
    source: str, *, virtual_data_bytes: int, pieces: Sequence[Piece]
) -> Contents:
    """Make the contents of that kind."""
    whole: Segment = PatternSegment(offset=0, length=virtual_data_bytes)
    if source == "memset":
        whole = MemsetSegment(offset=0, length=virtual_data_bytes, byte=BYTE)
    return Contents(whole, pieces)


def require_room(directory: Path, size_bytes: int, what: str) -> None:
    """Raise CapabilityError unless the directory has room for so much."""
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < size_bytes:
        raise CapabilityError(
            f"{directory} has {format_size(free_bytes)} left, {what} "
            f"{format_size(size_bytes)}",
            hint="make room there, or name another directory",
        )


def check_ranges(clone_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, length) of all checks: each size across or at each place."""
    ranges = []
    for place in CHECK_PLACES:
        for size in CHECK_SIZES:
            length = min(size, clone_bytes)
            offset = int(place * clone_bytes) - length // 2
            ranges.append((min(max(offset, 0), clone_bytes - length), length))
    return ranges
