"""Rows of a physical map, extent types, and the error for a wrong map."""

from __future__ import annotations

from dataclasses import dataclass, fields

from btrfs_ublk.errors import BtrfsUblkError

_KINDS = {0: "inline", 1: "regular", 2: "prealloc", 255: "hole"}
_COMPRESSIONS = {1: "zlib", 2: "lzo", 3: "zstd"}
_NUMBERS = {("type", text): number for number, text in _KINDS.items()} | {
    ("compression", text): number for number, text in _COMPRESSIONS.items()
}
#: The bit offsets of an extent type's parts in its code, and their largest values.
_PARTS = {
    "type": (0, 0xFF),
    "compression": (8, 0xFF),
    "encryption": (16, 0xFF),
    "other_encoding": (48, 0xFFFF),
}
#: The code of extent type "regular", without any encoding.
REGULAR = 1


@dataclass(frozen=True, slots=True)
class MapRow:
    """One physical piece of one file extent; offsets and sizes are bytes.

    The columns are those of ``btrfs-ublk-map-physical --help``: a logical extent in
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
            f"{field.name.replace('_', ' ').upper()} {getattr(self, field.name)}"
            for field in fields(self)
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


def type_text(code: int) -> str:
    """ "regular", "prealloc,compression=zstd", "type=9,encryption=1": as in the TSV."""
    values = {name: code >> at & most for name, (at, most) in _PARTS.items()}
    kind = values.pop("type")
    words = [_KINDS.get(kind, f"type={kind}")]
    for name, value in values.items():
        if value:
            names = _COMPRESSIONS if name == "compression" else {}
            words.append(f"{name}={names.get(value, value)}")
    return ",".join(words)


def type_code(text: str) -> int:
    """The inverse of type_text(); raises ValueError."""
    code = 0
    for position, word in enumerate(text.split(",")):
        name, separator, value = word.partition("=")
        if position == 0 and not separator:
            name, value = "type", word
        at, most = _PARTS.get(name, (0, -1))
        number = _NUMBERS.get((name, value))
        if number is None:
            if not (separator and value.isascii() and value.isdigit()):
                raise ValueError(f"{text!r} is not an extent type")
            number = int(value)
        if number > most or (name == "type") != (position == 0):
            raise ValueError(f"{text!r} is not an extent type")
        code |= number << at
    return code
