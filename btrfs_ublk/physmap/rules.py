"""The rules for a map of virtual data: one pure function on the columns per rule.

Each first compares whole columns, which is quick but says only whether something is
wrong. Only then it goes through the rows, to name the first wrong one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import compress, count, islice
from operator import ne

from btrfs_ublk.physmap import lanes
from btrfs_ublk.physmap.columns import MISSING, Columns
from btrfs_ublk.physmap.rows import REGULAR, MappingError, type_text
from btrfs_ublk.units import BLOCK_BYTES

Rule = Callable[[Columns], None]


def not_empty(columns: Columns) -> None:
    """The file has at least one extent."""
    if not len(columns):
        raise MappingError("not empty", "the file has no extents")


def all_regular(columns: Columns) -> None:
    """Every extent is regular: neither encoded nor preallocated, inline or a hole."""
    if (index := _first_not(columns.extent_type, REGULAR)) is not None:
        found = type_text(columns.extent_type[index])
        raise columns.violation("all regular", index, f"its type is {found!r}")


def single_device(columns: Columns) -> None:
    """All data is on device 1."""
    if (index := _first_not(columns.devid, 1)) is not None:
        raise columns.violation("single device", index, "its device is not 1")


def one_piece(columns: Columns) -> None:
    """Physical size = logical size: each extent is in one piece, stored unchanged."""
    if columns.physical_size != columns.logical_size:
        index = _first(map(ne, columns.physical_size, columns.logical_size))
        detail = "its physical size is not its logical size"
        raise columns.violation("one piece", index, detail)


def aligned(columns: Columns) -> None:
    """Every offset and size is a multiple of the block."""
    for name in _SIZES_AND_OFFSETS:
        column: array[int] = getattr(columns, name)
        if lanes.any_bits(column, BLOCK_BYTES - 1):
            index = _first(map((BLOCK_BYTES - 1).__and__, column))
            what = name.replace("_", " ").upper()
            detail = f"its {what} is not a multiple of {BLOCK_BYTES}"
            raise columns.violation("aligned", index, detail)


def one_run(columns: Columns) -> None:
    """The extents are one continuous run in the file, from offset 0."""
    starts_at_zero = len(columns) > 0 and columns.file_offset[0] == 0
    if starts_at_zero and lanes.follow_on(columns.file_offset, columns.file_size):
        return
    expected = 0
    for index, (offset, size) in enumerate(
        zip(columns.file_offset, columns.file_size, strict=True)
    ):
        if offset != expected or not size:
            detail = (
                f"it must begin at file offset {expected}" if size else "it is empty"
            )
            raise columns.violation("one run", index, detail)
        expected += size


def rising(columns: Columns) -> None:
    """File, logical and physical offsets rise together and do not overlap.

    Successive rows of one logical extent count as one.
    """
    file = columns.file_offset, columns.file_size
    logical = columns.logical_offset, columns.logical_size
    physical = columns.physical_offset, columns.physical_size
    if (
        lanes.rise(*file)
        and lanes.rise(*logical)
        and (physical == logical or lanes.rise(*physical))
    ):
        return
    for index in range(1, len(columns)):
        before, row = _extent(columns, index - 1), _extent(columns, index)
        ends = [(*file, "file")]
        if row != before:
            ends += [(*logical, "logical"), (*physical, "physical")]
        for offsets, sizes, name in ends:
            end = offsets[index - 1] + sizes[index - 1]
            if offsets[index] < end:
                detail = f"its {name} offset is below {end}, the end of the row before"
                raise columns.violation("rising", index, detail)


def exact_cover(columns: Columns) -> None:
    """Each logical extent is covered completely by its file extents, and no part twice.

    Its rows are successive; rising() checks that no extent comes back later.
    """
    if _each_row_is_an_extent(columns):
        return
    covered = 0
    for index in range(len(columns)):
        extent = _extent(columns, index)
        if index and extent != _extent(columns, index - 1):
            covered = 0
        elif index and covered == columns.logical_size[index]:
            detail = "its logical extent is covered already by the rows before"
            raise columns.violation("exact cover", index, detail)
        if columns.extent_offset[index] != covered:
            detail = f"it must begin at {covered} in its logical extent"
            raise columns.violation("exact cover", index, detail)
        covered += columns.file_size[index]
        missing = columns.logical_size[index] - covered
        is_last = index + 1 == len(columns) or extent != _extent(columns, index + 1)
        if missing < 0 or (missing and is_last):
            detail = (
                f"{missing} bytes at the end of its logical extent are not covered"
                if missing > 0
                else f"it goes {-missing} bytes past the end of its logical extent"
            )
            raise columns.violation("exact cover", index, detail)


def equal_totals(columns: Columns) -> None:
    """The file's extents, the logical and the physical ones add up to the same."""
    if columns.physical_size == columns.logical_size:
        if _each_row_is_an_extent(columns):
            return
    starts = [
        not index or _extent(columns, index) != _extent(columns, index - 1)
        for index in range(len(columns))
    ]
    file_bytes = sum(columns.file_size)
    logical_bytes = sum(compress(columns.logical_size, starts))
    physical_bytes = sum(compress(columns.physical_size, starts))
    if not file_bytes == logical_bytes == physical_bytes:
        raise MappingError(
            "equal totals",
            f"{file_bytes} bytes of file, {logical_bytes} of logical and "
            f"{physical_bytes} of physical extents",
        )


def run_starts(columns: Columns) -> list[int] | None:
    """Return the rows where a contiguous run begins. None unless all extents are
    regular, whole, on one device and one run in the file.
    """
    if not (
        len(columns)
        and _first_not(columns.extent_type, REGULAR) is None
        and _first_not(columns.devid, columns.devid[0]) is None
        and _first_not(columns.extent_offset, 0) is None
        and columns.file_size == columns.logical_size == columns.physical_size
        and lanes.follow_on(columns.file_offset, columns.file_size)
    ):
        return None
    shifts = lanes.differences(columns.physical_offset, columns.file_offset)
    if shifts is None:
        return None
    if _first_not(shifts, shifts[0]) is None:
        return [0]
    return [0, *compress(count(1), map(ne, shifts, islice(shifts, 1, None)))]


#: All rules; each comes after those that it builds upon.
RULES: tuple[Rule, ...] = (
    *(not_empty, all_regular, single_device, one_piece, aligned),
    *(one_run, rising, exact_cover, equal_totals),
)

_SIZES_AND_OFFSETS = (
    *("file_offset", "file_size", "extent_offset"),
    *("logical_size", "logical_offset"),
    *("physical_size", "physical_offset"),
)


def _extent(columns: Columns, index: int) -> tuple[int, ...]:
    """Return a key that is equal for rows of one logical extent, unique for others."""
    logical_offset = columns.logical_offset[index]
    if logical_offset == MISSING:
        return (MISSING, index)
    return (
        *(logical_offset, columns.logical_size[index]),
        *(columns.physical_offset[index], columns.devid[index]),
    )


def _each_row_is_an_extent(columns: Columns) -> bool:
    """Whether each row is exactly one logical extent."""
    return (
        columns.file_size == columns.logical_size
        and _first_not(columns.extent_offset, 0) is None
        and 0 not in columns.logical_size
        and lanes.rise(columns.logical_offset, columns.logical_size)
    )


def _first(flags: Iterable[object]) -> int:
    return next(compress(count(), flags))


def _first_not(column: array[int], value: int) -> int | None:
    if column == array("Q", [value]) * len(column):
        return None
    return _first(map(value.__ne__, column))
