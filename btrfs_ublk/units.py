"""Sizes: parsing and formatting them. All sizes are bytes."""

from __future__ import annotations

import re

from btrfs_ublk.errors import UsageError

#: The sector size of btrfs, and the logical block size of every device made here.
BLOCK_BYTES = 4096

#: The least virtual data of a seed (SEED_VIRTUAL_MIN_BYTES in csrc/btrfs/seed.h). The
#: kernel allocates no less anyway.
MIN_VIRTUAL_DATA_BYTES = 4 << 20

KIB, MIB, GIB, TIB, PIB, EIB = (1 << shift for shift in range(10, 70, 10))

_UNITS = "KMGTPE"
_SIZE = re.compile(rf"(\d+)\s*(?:([{_UNITS}])(?:iB|B)?|B)?", re.IGNORECASE)


def parse_size(text: str, *, what: str = "size") -> int:
    """Parse "4096", "275G", "4MiB" or "4E" into bytes; units are binary, in any case.

    ``what`` names the value in the UsageError, which is raised for a text that is no
    size, or is 8 EiB or more.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{what} {text!r} is not a size",
            hint="give bytes or a binary unit: 4096, 64K, 275G, 4E, 1GiB",
        )
    number, unit = match.groups()
    shift = 10 * (_UNITS.index(unit.upper()) + 1) if unit else 0
    size_bytes = int(number) << shift
    if size_bytes >= 1 << 63:
        raise UsageError(
            f"{what} {text!r} is too large",
            hint="the kernel addresses less than 8E: its offsets are signed",
        )
    return size_bytes


def parse_block_size(text: str, *, what: str = "size") -> int:
    """Parse, as parse_size() does, a positive multiple of BLOCK_BYTES."""
    size_bytes = parse_size(text, what=what)
    if size_bytes <= 0 or size_bytes % BLOCK_BYTES:
        near = size_bytes // BLOCK_BYTES * BLOCK_BYTES
        nearest = f"the nearest are {near} and {near + BLOCK_BYTES}"
        raise UsageError(
            f"{what} {text!r} ({size_bytes} bytes) is not a positive multiple of "
            f"{BLOCK_BYTES} bytes",
            hint=nearest if near > 0 else "give a unit: 64M, 1G",
        )
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Format as "4 EiB", "7.2 MiB", "512 B": in the largest unit with a value >= 1."""
    value, unit = float(size_bytes), "B"
    for letter in _UNITS:
        # The value as printed: 1023.99 has the four digits 1024.
        if float(f"{abs(value):.4g}") < 1024:
            break
        value, unit = value / 1024, f"{letter}iB"
    return f"{value:.4g} {unit}" if unit != "B" else f"{size_bytes} B"


def exact_size(size_bytes: int) -> str:
    """Format as "275G", "4E", "4097": the shortest text that parse_size() reads."""
    for power in range(len(_UNITS), 0, -1):
        if size_bytes and size_bytes % (1 << 10 * power) == 0:
            return f"{size_bytes >> 10 * power}{_UNITS[power - 1]}"
    return str(size_bytes)
