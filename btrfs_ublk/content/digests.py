"""Digests of a file's units (docs/materialisation.md, "root digest")."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import UsageError
from btrfs_ublk.kernel.new_file import write_new
from btrfs_ublk.units import KIB, MIB, parse_size

DIGEST_BYTES = 32
DEFAULT_UNIT_BYTES = 256 * KIB
_UNIT_BYTES = range(4 * KIB, MIB + 1)
_HEADER = b"btrfs-ublk units 1\n"


@dataclass(frozen=True)
class Digests:
    """The SHA-256 of each unit of a content of ``size_bytes``, in order."""

    size_bytes: int
    unit_bytes: int
    units: bytes

    @property
    def root(self) -> str:
        """The root digest, of all digests and the two numbers; hexadecimal."""
        numbers = struct.pack("<QI", self.size_bytes, self.unit_bytes)
        return hashlib.sha256(_HEADER + numbers + self.units).hexdigest()

    def part(self, offset: int, size_bytes: int) -> Digests:
        """Return those of a part, in bytes, which begins and ends between units."""
        first, end = (
            at // self.unit_bytes * DIGEST_BYTES for at in (offset, offset + size_bytes)
        )
        return Digests(size_bytes, self.unit_bytes, self.units[first:end])

    def hex(self) -> list[str]:
        """The digests as a source's description has them."""
        return [
            self.units[at : at + DIGEST_BYTES].hex()
            for at in range(0, len(self.units), DIGEST_BYTES)
        ]

    def write(self, path: StrPath) -> None:
        """Write a file for ``{"path": …}`` of a description: completely, or not at
        all."""
        write_new(Path(path), self.units, mode=0o644, replace=True, synced=True)


def digest_file(
    path: StrPath,
    *,
    unit_bytes: int = DEFAULT_UNIT_BYTES,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Digests:
    """Compute the digests of a file. ``progress`` is called with the number of bytes
    read since the last call. Raises UsageError for a size that no unit has, and
    OSError."""
    check_unit(unit_bytes)
    with open(path, "rb") as file:
        return digest_stream(file, unit_bytes, progress)


def digest_stream(
    file: IO[bytes], unit_bytes: int, progress: Callable[[int], None]
) -> Digests:
    """Do the same for all that is read of an open file, which need not be a file."""
    digests = bytearray()
    size_bytes = 0
    while unit := file.read(unit_bytes):
        digests += hashlib.sha256(unit).digest()
        size_bytes += len(unit)
        progress(len(unit))
    return Digests(size_bytes, unit_bytes, bytes(digests))


def parse_unit(text: str, *, what: str) -> int:
    """Parse the size of units, in bytes. Raises UsageError, which names it ``what``."""
    unit_bytes = parse_size(text, what=what)
    try:
        check_unit(unit_bytes)
    except UsageError as error:
        error.prefix(f"{what} {text}")
        raise
    return unit_bytes


def check_unit(unit_bytes: int) -> None:
    """Raise UsageError unless units can have this size."""
    if unit_bytes not in _UNIT_BYTES or unit_bytes & (unit_bytes - 1):
        raise UsageError(
            f"a unit cannot have {unit_bytes} bytes",
            hint="its size is a power of two from 4K to 1M",
        )
