"""A map file that tests fill, and what must be read of it."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

from support.store_shell import StoreShell, root_of, units_of

BLOCK = 4096
UNIT = 65536


def pattern(length: int) -> bytes:
    """What a ``pattern`` source holds, from its start."""
    words = (at.to_bytes(8, "little") for at in range(0, length + 7, 8))
    return b"".join(words)[:length]


class VirtualData:
    """``blocks`` has what each block must read as; None: nothing is mapped."""

    def __init__(self, build: Path, directory: Path, size: int) -> None:
        self._build = build
        self._draw = random.Random(7)
        self.directory = directory
        self.map = directory / "map"
        self.blocks: list[bytes | None] = [None] * (size // BLOCK)

    def add(self, source: dict[str, Any], data: bytes, offset: int) -> None:
        """All of a source, at an offset of the virtual data."""
        length = -(-len(data) // BLOCK) * BLOCK
        with StoreShell(self._build, self.map) as shell:
            answer = shell.add([[offset, length, 0, 0]], source)
            assert "error" not in answer, answer
        padded = data + bytes(length - len(data))
        for at in range(0, length, BLOCK):
            self.blocks[(offset + at) // BLOCK] = padded[at : at + BLOCK]

    def add_file(
        self, name: str, offset: int, size: int, *, digests: bool = False
    ) -> Path:
        path = self.directory / name
        data = self._draw.randbytes(size)
        path.write_bytes(data)
        source = {"size": size, "unit": UNIT, "kind": "file", "path": str(path)}
        if digests:
            units = units_of(data, UNIT)
            source["digests"] = [unit.hex() for unit in units]
            source["root"] = root_of(units, size_bytes=size, unit_bytes=UNIT)
        self.add(source, data, offset)
        return path

    def fill(self) -> None:
        """22 units of all local kinds, next to each other, with holes."""
        self.add({"size": 2 * UNIT, "kind": "memset", "byte": 7}, b"\7" * 2 * UNIT, 0)
        size = UNIT + 4003  # in mid-word of the last block, and not a whole one
        self.add({"size": size, "kind": "pattern"}, pattern(size), 2 * UNIT)
        self.add_file("plain", 4 * UNIT, 3 * UNIT + 1234)
        self.add_file("digests", 7 * UNIT + BLOCK, 5 * UNIT, digests=True)
        self.add_file("tiny", 12 * UNIT + BLOCK, 1)
        for number in range(16):
            offset = 20 * UNIT + number * BLOCK
            self.add_file(f"block-{number}", offset, BLOCK - number)

    def content(self, offset: int, length: int) -> bytes | int:
        """The bytes, or the errno that a read must fail with."""
        blocks = self.blocks[offset // BLOCK : (offset + length) // BLOCK]
        known = [block for block in blocks if block is not None]
        return b"".join(known) if len(known) == len(blocks) else errno.EIO
