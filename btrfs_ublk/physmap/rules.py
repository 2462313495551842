"""The rules for a map of virtual data: one pure function on the rows per rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from btrfs_ublk.physmap.rows import REGULAR, MappingError, MapRow
from btrfs_ublk.units import BLOCK_BYTES

Rows = Sequence[MapRow]

_SIZES_AND_OFFSETS = (
    *("file_offset", "file_size", "extent_offset"),
    *("logical_size", "logical_offset"),
    *("physical_size", "physical_offset"),
)


def _violation(rule: str, rows: Rows, index: int, detail: str) -> MappingError:
    return MappingError(rule, detail, row_number=index + 1, row=rows[index])


def _extent(row: MapRow) -> tuple[int | None, ...]:
    """Return a key that is equal for successive rows of one logical extent."""
    return row.logical_offset, row.logical_size, row.physical_offset, row.devid


def not_empty(rows: Rows) -> None:
    """The file has at least one extent."""
    if not rows:
        raise MappingError("not empty", "the file has no extents")


def all_regular(rows: Rows) -> None:
    """Every extent is regular: neither encoded nor preallocated, inline or a hole."""
    for index, row in enumerate(rows):
        if row.extent_type != REGULAR:
            detail = f"its type is {row.extent_type!r}"
            raise _violation("all regular", rows, index, detail)


def single_device(rows: Rows) -> None:
    """All data is on device 1."""
    for index, row in enumerate(rows):
        if row.devid != 1:
            raise _violation("single device", rows, index, "its device is not 1")


def one_piece(rows: Rows) -> None:
    """Physical size = logical size: each extent is in one piece, stored unchanged."""
    for index, row in enumerate(rows):
        if row.physical_size != row.logical_size:
            detail = "its physical size is not its logical size"
            raise _violation("one piece", rows, index, detail)


def aligned(rows: Rows) -> None:
    """Every offset and size is a multiple of the block."""
    for name in _SIZES_AND_OFFSETS:
        place = MapRow._fields.index(name)
        for index, row in enumerate(rows):
            value = row[place]
            if not isinstance(value, int) or value % BLOCK_BYTES:
                what = name.replace("_", " ").upper()
                detail = f"its {what} is not a multiple of {BLOCK_BYTES}"
                raise _violation("aligned", rows, index, detail)


def one_run(rows: Rows) -> None:
    """The extents are one continuous run in the file, from offset 0."""
    expected = 0
    for index, row in enumerate(rows):
        if row.file_offset != expected or not row.file_size:
            begin = f"it must begin at file offset {expected}"
            detail = begin if row.file_size else "it is empty"
            raise _violation("one run", rows, index, detail)
        expected += row.file_size


def rising(rows: Rows) -> None:
    """File, logical and physical offsets rise together and do not overlap.

    Successive rows of one logical extent count as one.
    """
    for index in range(1, len(rows)):
        before, row = rows[index - 1], rows[index]
        if row.file_offset < before.file_offset + before.file_size:
            name = "file"
        elif _extent(row) == _extent(before):
            continue
        elif _begins_within(row.logical_offset, before.logical_offset, before):
            name = "logical"
        elif _begins_within(row.physical_offset, before.physical_offset, before):
            name = "physical"
        else:
            continue
        detail = f"its {name} offset is below the end of the row before"
        raise _violation("rising", rows, index, detail)


def _begins_within(offset: int | None, begin: int | None, before: MapRow) -> bool:
    # One size will do: one_piece() comes first.
    return (offset or 0) < (begin or 0) + (before.logical_size or 0)


def exact_cover(rows: Rows) -> None:
    """Each logical extent is covered completely by its file extents, and no part twice.

    Its rows are successive; rising() checks that no extent comes back later.
    """
    covered = 0
    for index, row in enumerate(rows):
        size = row.logical_size or 0
        if index and _extent(row) != _extent(rows[index - 1]):
            covered = 0
        elif index and covered == size:
            detail = "its logical extent is covered already by the rows before"
            raise _violation("exact cover", rows, index, detail)
        if row.extent_offset != covered:
            detail = f"it must begin at {covered} in its logical extent"
            raise _violation("exact cover", rows, index, detail)
        covered += row.file_size
        missing = size - covered
        is_last = index + 1 == len(rows) or _extent(row) != _extent(rows[index + 1])
        if missing < 0 or (missing and is_last):
            detail = (
                f"{missing} bytes at the end of its logical extent are not covered"
                if missing > 0
                else f"it goes {-missing} bytes past the end of its logical extent"
            )
            raise _violation("exact cover", rows, index, detail)


def equal_totals(rows: Rows) -> None:
    """The file's extents, the logical and the physical ones add up to the same."""
    first = [
        row
        for index, row in enumerate(rows)
        if not index or _extent(row) != _extent(rows[index - 1])
    ]
    file_bytes = sum(row.file_size for row in rows)
    logical_bytes = sum(row.logical_size or 0 for row in first)
    physical_bytes = sum(row.physical_size or 0 for row in first)
    if not file_bytes == logical_bytes == physical_bytes:
        raise MappingError(
            "equal totals",
            f"{file_bytes} bytes of file, {logical_bytes} of logical and "
            f"{physical_bytes} of physical extents",
        )


#: All rules; each comes after those that it builds upon.
RULES: tuple[Callable[[Rows], None], ...] = (
    *(not_empty, all_regular, single_device, one_piece, aligned),
    *(one_run, rising, exact_cover, equal_totals),
)
