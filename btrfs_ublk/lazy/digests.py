"""Digests of a file's units (docs/materialisation.md, "root digest")."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import KIB, MIB

DIGEST_BYTES = 32
DEFAULT_UNIT_BYTES = 256 * KIB
_UNIT_BYTES = range(4 * KIB, MIB + 1)
_HEADER = b"btrfs-ublk units 1\n"


@dataclass(frozen=True)
class Digests:
    """SHA-256 of each unit of what has ``size_bytes``, one after the other."""

    size_bytes: int
    unit_bytes: int
    units: bytes

    @property
    def root(self) -> str:
        """Covers all of them, and the two numbers; hexadecimal."""
        numbers = struct.pack("<QI", self.size_bytes, self.unit_bytes)
        return hashlib.sha256(_HEADER + numbers + self.units).hexdigest()

    def hex(self) -> list[str]:
        """As a source's description has them."""
        return [
            self.units[at : at + DIGEST_BYTES].hex()
            for at in range(0, len(self.units), DIGEST_BYTES)
        ]

    def write(self, path: Path) -> None:
        """For ``{"path": …}`` of a description: the file is there as a whole or not."""
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(fd, "wb") as file:
                file.write(self.units)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise


def digest_file(
    path: Path,
    *,
    unit_bytes: int = DEFAULT_UNIT_BYTES,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Digests:
    """The digests of a file as it is. ``progress`` is told how many more bytes were
    read. Raises UsageError for a unit that is none, and OSError.
    """
    check_unit(unit_bytes)
    digests = bytearray()
    size_bytes = 0
    with path.open("rb") as file:
        while unit := file.read(unit_bytes):
            digests += hashlib.sha256(unit).digest()
            size_bytes += len(unit)
            progress(len(unit))
    return Digests(size_bytes, unit_bytes, bytes(digests))


def check_unit(unit_bytes: int) -> None:
    """Raises UsageError."""
    if unit_bytes not in _UNIT_BYTES or unit_bytes & (unit_bytes - 1):
        raise UsageError(
            f"a unit of {unit_bytes} bytes", hint="a power of two from 4K to 1M"
        )
