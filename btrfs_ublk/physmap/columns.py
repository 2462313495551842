"""The rows of a physical map, kept as columns.

A map of many terabytes has hundreds of thousands of rows: whole columns are compared at
C speed, and a row is made only when it is accessed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Self, overload

from btrfs_ublk.physmap.rows import MappingError, MapRow, type_code, type_text

#: A column's value for "none" (inline and hole have no logical extent).
MISSING = (1 << 64) - 1

COLUMN_COUNT = 9

#: The first bytes of the binary form; nine little-endian 64-bit numbers per row follow
#: (struct binary_row in csrc/physmap/rows.c).
BINARY_MAGIC = b"buphys1\n"
_FORM = "form"


class Columns(Sequence[MapRow]):
    """An immutable sequence of rows, over one ``array("Q")`` for each of their fields.

    NB: the arrays are shared, not copied; they must not be changed.
    """

    __slots__ = (
        *("file_offset", "file_size", "extent_offset", "extent_type"),
        *("logical_size", "logical_offset"),
        *("physical_size", "devid", "physical_offset"),
    )

    def __init__(self, columns: Sequence[array[int]]) -> None:
        """Nine columns in the order of MapRow's fields; extent_type holds codes."""
        if len(columns) != COLUMN_COUNT or len({len(x) for x in columns}) != 1:
            raise ValueError(f"expected {COLUMN_COUNT} columns of equal length")
        self.file_offset, self.file_size, self.extent_offset = columns[:3]
        self.extent_type, self.logical_size, self.logical_offset = columns[3:6]
        self.physical_size, self.devid, self.physical_offset = columns[6:]

    @classmethod
    def from_rows(cls, rows: Iterable[MapRow]) -> Self:
        columns = [array("Q") for _ in range(COLUMN_COUNT)]
        for row in rows:
            values = (
                *(row.file_offset, row.file_size, row.extent_offset),
                *(type_code(row.extent_type), row.logical_size, row.logical_offset),
                *(row.physical_size, row.devid, row.physical_offset),
            )
            for column, value in zip(columns, values, strict=True):
                column.append(MISSING if value is None else value)
        return cls(columns)

    @classmethod
    def parse_binary(cls, data: bytes) -> Self:
        """Parse the helper's binary form. Raises MappingError for malformed input."""
        if not data.startswith(BINARY_MAGIC):
            raise MappingError(
                _FORM, "not the binary output of btrfs-ublk-map-physical"
            )
        cells = array("Q")
        row_bytes = COLUMN_COUNT * cells.itemsize
        if (len(data) - len(BINARY_MAGIC)) % row_bytes:
            raise MappingError(_FORM, "its last row is only a part of one")
        cells.frombytes(memoryview(data)[len(BINARY_MAGIC) :])
        if sys.byteorder == "big":
            cells.byteswap()
        return cls([cells[number::COLUMN_COUNT] for number in range(COLUMN_COUNT)])

    def __len__(self) -> int:
        return len(self.file_offset)

    @overload
    def __getitem__(self, index: int) -> MapRow: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[MapRow]: ...

    def __getitem__(self, index: int | slice) -> MapRow | Sequence[MapRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        mapped = (
            *(self.logical_size[index], self.logical_offset[index]),
            *(self.physical_size[index], self.devid[index]),
            self.physical_offset[index],
        )
        return MapRow(
            self.file_offset[index],
            self.file_size[index],
            self.extent_offset[index],
            type_text(self.extent_type[index]),
            *(None if value == MISSING else value for value in mapped),
        )

    def violation(self, rule: str, index: int, detail: str) -> MappingError:
        """Return the error that the row at this index breaks a rule."""
        return MappingError(rule, detail, row_number=index + 1, row=self[index])
