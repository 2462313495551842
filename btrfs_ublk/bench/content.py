"""What benchmarks read: a clone of ranges of virtual data, and its expected bytes.

A clone has a quarter from the start of the virtual data, half of it from around the
middle, and a quarter from the end. These are the sources of the data:

memset    one repeated byte, the cheapest source; does not show positions
pattern   each 8 bytes contain their own position, so that misplaced blocks are noticed
file      a local file of up to 256 MiB with such a pattern, repeated
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.readers import Reader
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError
from btrfs_ublk.kernel.reflink import clone_range, match_checksums
from btrfs_ublk.server import FileSegment, MemsetSegment, PatternSegment, Segment
from btrfs_ublk.units import BLOCK_BYTES, MIB, format_size

BYTE = ord("a")
_FILE_BYTES = 256 * MIB
_WRITE_BYTES = MIB

#: The sizes read at each place: parts of a block, blocks, more than one request.
CHECK_SIZES = (1, 511, BLOCK_BYTES, 3 * BLOCK_BYTES + 1, 64 << 10, MIB)
#: Places as shares of the clone: its ends, and the seams between its pieces.
CHECK_PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)


class WrongDataError(BtrfsUblkError):
    """A byte was not as expected."""


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
    """The segments that are served, and those expected when reading, with offsets in
    the virtual file. What is expected does not depend on what the server finds.
    """

    served: Sequence[Segment]
    expected: Sequence[Segment]


def _memset(virtual_data_bytes: int, _: Sequence[Piece], __: Path) -> Contents:
    segments = [MemsetSegment(offset=0, length=virtual_data_bytes, byte=BYTE)]
    return Contents(segments, segments)


def _pattern(virtual_data_bytes: int, _: Sequence[Piece], __: Path) -> Contents:
    segments = [PatternSegment(offset=0, length=virtual_data_bytes)]
    return Contents(segments, segments)


def _file(_: int, pieces: Sequence[Piece], directory: Path) -> Contents:
    """Serve only what is cloned, as each repetition of the file takes a segment."""
    file_bytes = min(_FILE_BYTES, max(piece.size_bytes for piece in pieces))
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < file_bytes:
        raise CapabilityError(
            f"{directory} has {format_size(free_bytes)} left, the source takes "
            f"{format_size(file_bytes)}",
            hint="make room there, or name another directory",
        )
    path = directory / "source"
    numbers = PatternSegment(offset=0, length=file_bytes)
    with path.open("xb") as file:
        for offset in range(0, file_bytes, _WRITE_BYTES):
            file.write(numbers.content(offset, min(_WRITE_BYTES, file_bytes - offset)))
    ranges = [
        place for piece in pieces for place in _repeated(piece, length=file_bytes)
    ]
    return Contents(
        [
            FileSegment(offset=offset, length=length, path=str(path))
            for offset, length in ranges
        ],
        [
            PatternSegment(offset=offset, length=length, base=-offset)
            for offset, length in ranges
        ],
    )


def _repeated(piece: Piece, *, length: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, piece.size_bytes, length):
        yield piece.virtual_offset + offset, min(length, piece.size_bytes - offset)


_SOURCES: dict[str, Callable[[int, Sequence[Piece], Path], Contents]] = {
    "memset": _memset,
    "pattern": _pattern,
    "file": _file,
}


def make_contents(
    source: str, *, virtual_data_bytes: int, pieces: Sequence[Piece], directory: Path
) -> Contents:
    """Make the contents of that kind, with their files in ``directory``. Raises
    CapabilityError when that has no room.
    """
    return _SOURCES[source](virtual_data_bytes, pieces, directory)


def expected(
    contents: Contents, pieces: Sequence[Piece], offset: int, length: int
) -> bytes:
    """Return the bytes that a range of the clone must have."""
    parts = []
    end = offset + length
    for piece in pieces:
        start = max(offset, piece.offset)
        stop = min(end, piece.offset + piece.size_bytes)
        shift = piece.virtual_offset - piece.offset
        for segment in contents.expected if start < stop else ():
            first = max(start + shift, segment.offset)
            last = min(stop + shift, segment.end)
            if first < last:
                parts.append(segment.content(first, last - first))
    return b"".join(parts)


def check_ranges(clone_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, length) of all checks: each size across or at each place."""
    ranges = []
    for place in CHECK_PLACES:
        for size in CHECK_SIZES:
            length = min(size, clone_bytes)
            offset = int(place * clone_bytes) - length // 2
            ranges.append((min(max(offset, 0), clone_bytes - length), length))
    return ranges


def check(path: Path, contents: Contents, pieces: Sequence[Piece], read: Reader) -> int:
    """Read the ranges back; returns their number. Raises WrongDataError for the first
    wrong byte, OSError for what cannot be read.
    """
    ranges = check_ranges(sum(piece.size_bytes for piece in pieces))
    for offset, length in ranges:
        found = read(path, offset, length)
        wanted = expected(contents, pieces, offset, length)
        if found != wanted:
            wrong = first_difference(found, wanted)
            raise WrongDataError(
                f"byte {offset + wrong} of the clone is {found[wrong : wrong + 1]!r}, "
                f"not {wanted[wrong : wrong + 1]!r} (read of {length} at {offset})"
            )
    return len(ranges)


def first_difference(one: bytes, other: bytes) -> int:
    """Return the index of the first byte that differs; if one begins with the other,
    the length of the shorter.
    """
    for index, (left, right) in enumerate(zip(one, other)):
        if left != right:
            return index
    return min(len(one), len(other))
