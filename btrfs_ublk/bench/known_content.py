"""Known content for measured files and devices, and the check of it."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Protocol

from btrfs_ublk.base.readers import Reader
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.units import BLOCK_BYTES, MIB

_WORD_BYTES = 8
_SEED = 20261120


class Content(Protocol):
    """The bytes that should be read. Segments of a description have this method."""

    def content(self, offset: int, length: int) -> bytes:
        """Return the bytes of [offset, offset + length)."""


class Stamps:
    """Repeated random bytes, except that each block begins with its offset in 8 bytes.

    They are random, since compressible data (on zram) would be answered differently.
    """

    def content(self, offset: int, length: int) -> bytes:
        start = offset // BLOCK_BYTES * BLOCK_BYTES
        end = -(-(offset + length) // BLOCK_BYTES) * BLOCK_BYTES
        data = bytearray()
        while start + len(data) < end:
            within = (start + len(data)) % MIB
            data += _noise()[within : within + end - start - len(data)]
        for position in range(0, end - start, BLOCK_BYTES):
            stamp = (start + position).to_bytes(_WORD_BYTES, "little")
            data[position : position + _WORD_BYTES] = stamp
        return bytes(data[offset - start :][:length])


@cache
def _noise() -> bytes:
    return random.Random(_SEED).randbytes(MIB)


STAMPS = Stamps()


def write_content(path: Path, content: Content, size_bytes: int) -> None:
    """Fill a new file, or a block device, from its start. Afterwards it is on the
    medium, and no longer in the page cache.
    """
    with path.open("r+b" if path.exists() else "xb", buffering=0) as file:
        for offset in range(0, size_bytes, MIB):
            piece = content.content(offset, min(MIB, size_bytes - offset))
            if file.write(piece) != len(piece):
                raise BtrfsUblkError(f"{path} takes no more than {file.tell()} bytes")
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check_content(
    path: Path,
    content: Content,
    size_bytes: int,
    *,
    read: Reader,
    samples: int,
    chances: random.Random,
    or_else: bytes | None = None,
) -> None:
    """Read the first block, the last one, and ``samples`` others. Each must be as
    expected, or ``or_else``. Raises BtrfsUblkError, which names the first wrong byte.
    """
    blocks = size_bytes // BLOCK_BYTES
    chosen = [0, blocks - 1, *(chances.randrange(blocks) for _ in range(samples))]
    for block in chosen:
        offset = block * BLOCK_BYTES
        found = read(path, offset, BLOCK_BYTES)
        wanted = content.content(offset, BLOCK_BYTES)
        if found in (wanted, or_else):
            continue
        first = next(
            (i for i, (a, b) in enumerate(zip(found, wanted)) if a != b), len(found)
        )
        raise BtrfsUblkError(
            f"{path} holds wrong data: byte {offset + first} is "
            f"{found[first : first + 1].hex() or 'missing'}, not "
            f"{wanted[first : first + 1].hex()}"
        )
