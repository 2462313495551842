"""Rows of a physical map, and the error for a wrong map."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from btrfs_ublk.errors import BtrfsUblkError

#: The first bytes of the binary form; nine little-endian 64-bit numbers per row follow
#: (struct binary_row in csrc/physmap/rows.c).
BINARY_MAGIC = b"buphys1\n"
_ROW = struct.Struct("<9Q")
#: A number for "none" (inline and hole have no logical extent).
_NONE = (1 << 64) - 1
_FORM = "form"

_KINDS = {0: "inline", 1: "regular", 2: "prealloc", 255: "hole"}
_COMPRESSIONS = {1: "zlib", 2: "lzo", 3: "zstd"}
#: The extent type "regular", without any encoding.
REGULAR = "regular"


class MapRow(NamedTuple):
    """One physical piece of one file extent; offsets and sizes are bytes.

    The columns are those of ``btrfs-ublk map-physical --help``: a logical extent in
    several pieces or copies has a row for each. The last five are None where there is
    no logical extent (inline, hole).
    """

    file_offset: int
    file_size: int
    extent_offset: int
    extent_type: str
    logical_size: int | None
    logical_offset: int | None
    physical_size: int | None
    devid: int | None
    physical_offset: int | None

    def __str__(self) -> str:
        return ", ".join(
            f"{name.replace('_', ' ').upper()} {value}"
            for name, value in self._asdict().items()
        )


class MappingError(BtrfsUblkError):
    """A map breaks a rule.

    ``rule`` names the rule. ``row_number`` (from 1, as in the TSV below its header) and
    ``row`` are the first row that breaks it, None for the map as a whole.
    """

    def __init__(
        self,
        rule: str,
        detail: str,
        *,
        row_number: int | None = None,
        row: MapRow | None = None,
        hint: str | None = None,
    ) -> None:
        where = "the map" if row_number is None else f"row {row_number}"
        values = f" ({row})" if row is not None else ""
        super().__init__(
            f"physical map: {where} breaks the rule {rule!r}: {detail}{values}",
            hint=hint,
        )
        self.rule = rule
        self.row_number = row_number
        self.row = row


@lru_cache
def _type_text(code: int) -> str:
    """ "regular", "prealloc,compression=zstd", "type=9,encryption=1": as in the TSV."""
    kind, compression = code & 0xFF, code >> 8 & 0xFF
    encryption, other = code >> 16 & 0xFF, code >> 48
    words = [_KINDS.get(kind, f"type={kind}")]
    if compression:
        words.append(f"compression={_COMPRESSIONS.get(compression, compression)}")
    words += [f"encryption={encryption}"] * bool(encryption)
    words += [f"other_encoding={other}"] * bool(other)
    return ",".join(words)


def parse_rows(data: bytes) -> Iterator[MapRow]:
    """Parse the helper's binary form. Raises MappingError for malformed input."""
    if not data.startswith(BINARY_MAGIC):
        raise MappingError(_FORM, "not the binary output of btrfs-ublk-map-physical")
    cells = memoryview(data)[len(BINARY_MAGIC) :]
    if len(cells) % _ROW.size:
        raise MappingError(_FORM, "its last row is only a part of one")
    for values in _ROW.iter_unpack(cells):
        mapped = values[4:]
        if _NONE in mapped:
            mapped = tuple(None if value == _NONE else value for value in mapped)
        yield MapRow._make((*values[:3], _type_text(values[3]), *mapped))
