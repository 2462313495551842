"""Where files lie in the data of an image, as its metadata say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes

from btrfs_ublk.base.helpers import READIMAGE, helper_path
from btrfs_ublk.base.process import Child, spawn
from btrfs_ublk.image.documents import DATA_OFFSET, InvalidImageError
from btrfs_ublk.image.start.programs import Range
from btrfs_ublk.image.traces import Extent as TraceExtent
from btrfs_ublk.image.traces import joined

#: A bound for what would otherwise wait for ever.
_TIMEOUT_S = 86400.0
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileExtent:
    """Where a part of a file lies in the data object of an image."""

    start: int
    end: int
    paths: tuple[str, ...]
    offset: int
    length: int


def list_extents(seed: Path, subvolume: int) -> list[FileExtent]:
    """Return the extents of a tree, by their place. NB: those that are shared are in it
    more than once, one behind the other. Paths that are no UTF-8 are left out."""
    found: list[tuple[int, int, str, int, int]] = []
    others: dict[str, list[str]] = {}
    argv: list[str | Path] = [helper_path(READIMAGE), "extents", str(subvolume), seed]
    with spawn(argv, pipe_stdout=True) as child:
        assert child.stdout is not None
        with open(child.stdout.fileno(), "rb", _READ_BYTES, closefd=False) as lines:
            for line in lines:
                name, *fields = line.rstrip(b"\n").split(b"\t")
                path = os.fsdecode(unquote_to_bytes(name))
                if len(fields) == 1:
                    first = os.fsdecode(unquote_to_bytes(fields[0]))
                    others.setdefault(first, []).append(path)
                    continue
                offset, length, place, stored = map(int, fields)
                start = place - DATA_OFFSET
                found.append((start, start + stored, path, offset, length))
        finished(child, seed)
    return [
        FileExtent(
            start,
            end,
            tuple(x for x in (path, *others.get(path, ())) if _is_utf8(x)),
            offset,
            length,
        )
        for start, end, path, offset, length in sorted(found)
    ]


def units_of_ranges(
    seed: Path, subvolume: int, ranges: Sequence[Range], unit: int
) -> list[TraceExtent]:
    """Return where ranges of files lie in the data of an image whose extents are not
    compressed, in whole units, by their place: neighbours are fetched together."""
    wanted: dict[str, list[Range]] = {}
    for one in ranges:
        wanted.setdefault(one.path, []).append(one)
    units: set[int] = set()
    for extent in list_extents(seed, subvolume):
        for one in (x for path in extent.paths for x in wanted.get(path, ())):
            skipped = max(one.offset - extent.offset, 0)
            end = min(one.offset + one.length - extent.offset, extent.length)
            if skipped < end:
                first, last = extent.start + skipped, extent.start + end - 1
                units |= {*range(first // unit, last // unit + 1)}
    return joined((x * unit, unit) for x in sorted(units))


def _is_utf8(path: str) -> bool:
    """Whether JSON can have it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def finished(child: Child, whole: Path) -> str:
    """Wait for the helper, and return what it said. Raises InvalidImageError."""
    status = child.wait(_TIMEOUT_S)
    said = child.stderr_tail().strip()
    if status != 0:
        words = said.partition(": error: ")[2] or said or f"{READIMAGE}: {status}"
        raise InvalidImageError(words.replace(str(whole), "the image"))
    return said
