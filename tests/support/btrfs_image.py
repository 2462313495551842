"""Reads a btrfs image for tests, independently of the code that writes it.

Only what such a test needs: one device, single copies whose logical addresses equal
their offsets, no checksums (``btrfs check`` looks at those). Facts: struct
btrfs_super_block, btrfs_header, btrfs_item and btrfs_key_ptr of the kernel.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

SUPER_OFFSETS = (64 << 10, 64 << 20, 256 << 30)
SUPER_BYTES = 4096

_HEADER = struct.Struct("<32s16sQQ16sQQIB")
_ITEM = struct.Struct("<QBQII")
_POINTER = struct.Struct("<QBQQQ")
_SUPER = struct.Struct("<32s16sQQ8sQQQQQQQQQIIIIIQQQQHBBB98s256s")

ROOT_ITEM, ROOT_BACKREF, ROOT_REF = 132, 144, 156
METADATA_ITEM, EXTENT_ITEM = 169, 168
INODE_ITEM, INODE_REF, DIR_ITEM, DIR_INDEX, EXTENT_DATA = 1, 12, 84, 96, 108
BLOCK_GROUP_ITEM, FREE_SPACE_INFO, FREE_SPACE_EXTENT = 192, 198, 199
DEV_EXTENT, DEV_ITEM, CHUNK_ITEM = 204, 216, 228

EXTENT_TREE, DEV_TREE, FS_TREE, FREE_SPACE_TREE, BLOCK_GROUP_TREE = 2, 4, 5, 10, 11


@dataclass(frozen=True)
class Super:
    fsid: bytes
    bytenr: int
    flags: int
    generation: int
    root: int
    chunk_root: int
    total_bytes: int
    bytes_used: int
    node_bytes: int
    compat_ro_flags: int
    incompat_flags: int
    device_uuid: bytes
    label: bytes


@dataclass(frozen=True)
class Item:
    objectid: int
    type: int
    offset: int
    data: bytes

    @property
    def key(self) -> tuple[int, int, int]:
        return self.objectid, self.type, self.offset

    def unpack(self, layout: str, at: int = 0) -> tuple[int, ...]:
        return struct.unpack_from("<" + layout, self.data, at)


@dataclass(frozen=True)
class Block:
    bytenr: int
    level: int
    owner: int


class Image:
    """An open image; ``blocks`` collects every tree block that was visited."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.super = self.read_super(SUPER_OFFSETS[0])
        self.blocks: list[Block] = []

    def _read(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        data = self._file.read(length)
        assert len(data) == length, f"the image ends within {length} bytes at {offset}"
        return data

    def read_super(self, offset: int) -> Super:
        fields = _SUPER.unpack_from(self._read(offset, SUPER_BYTES))
        assert fields[4] == b"_BHRfS_M", f"no superblock at {offset}"
        device, label = fields[27:29]
        return Super(
            fsid=fields[1],
            bytenr=fields[2],
            flags=fields[3],
            generation=fields[5],
            root=fields[6],
            chunk_root=fields[7],
            total_bytes=fields[10],
            bytes_used=fields[11],
            node_bytes=fields[15],
            compat_ro_flags=fields[21],
            incompat_flags=fields[22],
            device_uuid=device[66:82],
            label=label.rstrip(b"\0"),
        )

    def items(self, bytenr: int) -> Iterator[Item]:
        """All items of the tree, in order; asserts that they are in order."""
        last: tuple[int, int, int] | None = None
        for item in self._walk(bytenr, None):
            assert last is None or item.key > last, f"{item.key} after {last}"
            last = item.key
            yield item

    def _walk(self, bytenr: int, level: int | None) -> Iterator[Item]:
        block = self._read(bytenr, self.super.node_bytes)
        _, fsid, own_address, _, _, _, owner, count, own_level = _HEADER.unpack_from(
            block
        )
        assert (fsid, own_address) == (self.super.fsid, bytenr)
        assert level is None or own_level == level
        self.blocks.append(Block(bytenr, own_level, owner))
        for slot in range(count):
            if own_level == 0:
                at = _HEADER.size + slot * _ITEM.size
                objectid, type_, offset, start, size = _ITEM.unpack_from(block, at)
                start += _HEADER.size
                yield Item(objectid, type_, offset, block[start : start + size])
            else:
                at = _HEADER.size + slot * _POINTER.size
                child = _POINTER.unpack_from(block, at)[3]
                yield from self._walk(child, own_level - 1)

    def roots(self) -> dict[int, int]:
        """Where each tree starts, by object id."""
        return {
            item.objectid: item.unpack("Q", 176)[0]
            for item in self.items(self.super.root)
            if item.type == ROOT_ITEM
        }


def data_bytes(path: Path) -> Iterator[tuple[int, bytes]]:
    """What of a sparse file is not zero, with its offset, in steps of 4 KiB."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        offset = 0
        while offset < end:
            try:
                offset = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            except OSError:
                return
            hole = os.lseek(file.fileno(), offset, os.SEEK_HOLE)
            while offset < hole:
                block = os.pread(file.fileno(), min(4096, hole - offset), offset)
                if block.strip(b"\0"):
                    yield offset, block
                offset += len(block)
