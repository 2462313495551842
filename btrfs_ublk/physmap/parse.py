"""Parsers for the output formats of ``btrfs-ublk-map-physical``."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable

from btrfs_ublk.physmap.columns import COLUMN_COUNT, MISSING
from btrfs_ublk.physmap.rows import MappingError, type_code

#: The first line of the TSV.
TSV_HEADER = "\t".join(
    [
        *("FILE OFFSET", "FILE SIZE", "EXTENT OFFSET", "EXTENT TYPE"),
        *("LOGICAL SIZE", "LOGICAL OFFSET"),
        *("PHYSICAL SIZE", "DEVID", "PHYSICAL OFFSET"),
    ]
)
#: The first bytes of the binary form; nine little-endian 64-bit numbers per row follow
#: (struct binary_row in csrc/physmap/rows.c).
BINARY_MAGIC = b"buphys1\n"

_TYPE_COLUMN = 3
#: The first columns always have a value; the others are all empty or all filled.
_FILE_COLUMNS = 4
_NUMBER = re.compile(r"[0-9]+")
_NOT_IN_NUMBERS = " +-\r\v\f\x1c\x1d\x1e\x1f"
_FORM = "form"


def parse_tsv(text: str) -> list[array[int]]:
    """Parse the helper's TSV. Raises MappingError, which names a malformed row."""
    header, newline, body = text.partition("\n")
    if header != TSV_HEADER or not newline or (body and not body.endswith("\n")):
        raise MappingError(
            _FORM, "not the output of btrfs-ublk-map-physical, or only a part of it"
        )
    try:
        return _parse_body(body)
    except (ValueError, OverflowError):
        raise _malformed_row(body) from None


def _parse_body(body: str) -> list[array[int]]:
    """Parse well-formed rows quickly. Raises any ValueError for others."""
    # int() accepts more than digits: "+1", " 1", "1_0", digits of other scripts.
    if not body.isascii() or any(character in body for character in _NOT_IN_NUMBERS):
        raise ValueError("not decimal numbers")
    if "_" in body and "_" in body.replace("other_encoding", ""):
        raise ValueError("not decimal numbers")
    cells = body.replace("\n", "\t\n\t").split("\t")
    cells.pop()
    # Each newline is a cell of its own, after the nine columns of each row.
    width = COLUMN_COUNT + 1
    ends = cells[COLUMN_COUNT::width]
    if len(cells) % width or ends.count("\n") != len(ends):
        raise ValueError("not nine columns")
    columns: list[array[int]] = []
    texts: list[list[str]] = []
    for number in range(COLUMN_COUNT):
        column = cells[number::width]
        if number == _TYPE_COLUMN:
            columns.append(_convert(column, type_code))
            texts.append([])
            continue
        # Columns of sizes are often equal; comparing different ones ends early.
        same = texts.index(column) if column in texts else None
        if same is not None and same != _TYPE_COLUMN:
            columns.append(columns[same])
        else:
            is_optional = number >= _FILE_COLUMNS
            columns.append(_convert(column, _number_or_missing if is_optional else int))
        texts.append(column)
    _check_emptiness(columns)
    return columns


def _convert(cells: list[str], convert: Callable[[str], int]) -> array[int]:
    """Convert a column; sizes, types and devices have few different values."""
    values = {cell: convert(cell) for cell in set(cells[:64])}
    if len(values) == 1 and cells.count(cells[0]) == len(cells):
        return array("Q", values.values()) * len(cells)
    if len(values) < 32:
        try:
            return array("Q", map(values.__getitem__, cells))
        except KeyError:
            pass
    try:
        return array("Q", map(int, cells))
    except ValueError:
        return array("Q", map(convert, cells))


def _number_or_missing(cell: str) -> int:
    return int(cell) if cell else MISSING


def _check_emptiness(columns: list[array[int]]) -> None:
    mapped = columns[_FILE_COLUMNS:]
    if any(MISSING in column for column in mapped):
        for values in zip(*mapped, strict=True):
            if values.count(MISSING) not in (0, len(values)):
                raise ValueError("some values are missing")


def _malformed_row(body: str) -> MappingError:
    """Find, slowly, the first row that _parse_body() cannot parse, and the reason."""
    for number, line in enumerate(body.split("\n")[:-1], 1):
        cells = line.split("\t")
        detail = None
        if len(cells) != COLUMN_COUNT:
            detail = f"it has {len(cells)} columns, not {COLUMN_COUNT}"
        elif cells[_FILE_COLUMNS:].count("") not in (0, COLUMN_COUNT - _FILE_COLUMNS):
            detail = "only some of its logical and physical columns are empty"
        else:
            for column, cell in enumerate(cells):
                if not _is_well_formed(column, cell):
                    detail = f"column {column + 1} cannot be {cell!r}"
                    break
        if detail:
            return MappingError(_FORM, f"{detail}: {line!r}", row_number=number)
    return MappingError(_FORM, "it is malformed")


def _is_well_formed(column: int, cell: str) -> bool:
    if column == _TYPE_COLUMN:
        try:
            type_code(cell)
        except ValueError:
            return False
        return True
    if not cell:
        return column >= _FILE_COLUMNS
    return bool(_NUMBER.fullmatch(cell)) and int(cell) < MISSING


def parse_binary(data: bytes) -> list[array[int]]:
    """Parse the helper's binary form into columns. Raises MappingError."""
    if not data.startswith(BINARY_MAGIC):
        raise MappingError(_FORM, "not the binary output of btrfs-ublk-map-physical")
    cells = array("Q")
    row_bytes = COLUMN_COUNT * cells.itemsize
    if (len(data) - len(BINARY_MAGIC)) % row_bytes:
        raise MappingError(_FORM, "its last row is only a part of one")
    cells.frombytes(memoryview(data)[len(BINARY_MAGIC) :])
    if sys.byteorder == "big":
        cells.byteswap()
    return [cells[number::COLUMN_COUNT] for number in range(COLUMN_COUNT)]
