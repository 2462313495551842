"""Changes seeds on purpose, with correct checksums, independently of the code that
reads them.

Only what tests of the check need: trees whose items are all in one leaf (or reached
through nodes that stay as they are), logical addresses equal to device offsets. Facts:
struct btrfs_super_block, btrfs_header and btrfs_item of the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from support.btrfs_image import SUPER_BYTES, SUPER_OFFSETS, Image

HEADER_BYTES, ITEM_BYTES, CSUM_BYTES = 101, 25, 32
CHUNK_TREE, ROOT_TREE, CSUM_TREE = 3, 1, 7
Key = tuple[int, int, int]

#: Offsets of fields: struct btrfs_super_block, struct btrfs_header.
SUPER = {
    "bytenr": (48, "Q"),
    "flags": (56, "Q"),
    "generation": (72, "Q"),
    "root": (80, "Q"),
    "chunk_root": (88, "Q"),
    "log_root": (96, "Q"),
    "total_bytes": (112, "Q"),
    "bytes_used": (120, "Q"),
    "root_dir": (128, "Q"),
    "num_devices": (136, "Q"),
    "sectorsize": (144, "I"),
    "nodesize": (148, "I"),
    "array_size": (160, "I"),
    "incompat_flags": (188, "Q"),
    "csum_type": (196, "H"),
    "dev_total_bytes": (201 + 8, "Q"),
    "dev_bytes_used": (201 + 16, "Q"),
    "dev_uuid": (201 + 66, "B"),
    "array": (811, "B"),
}
HEADER = {
    "fsid": (32, "Q"),
    "bytenr": (48, "Q"),
    "chunk_tree_uuid": (64, "Q"),
    "generation": (80, "Q"),
    "owner": (88, "Q"),
    "nritems": (96, "I"),
    "level": (100, "B"),
}


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes | bytearray) -> int:
    """Castagnoli, inverted before and after, as btrfs stores it."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def with_checksum(block: bytes | bytearray) -> bytes:
    csum = struct.pack("<I", crc32c(block[CSUM_BYTES:])).ljust(CSUM_BYTES, b"\0")
    return csum + bytes(block[CSUM_BYTES:])


@dataclass
class LeafItem:
    key: Key
    data: bytearray

    def set(self, layout: str, at: int, value: int) -> None:
        struct.pack_into("<" + layout, self.data, at, value)

    def get(self, layout: str, at: int) -> int:
        value: int = struct.unpack_from("<" + layout, self.data, at)[0]
        return value


class Editor:
    """An image open for changes; each is written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        image = Image(self._file)
        self.node_bytes = image.super.node_bytes
        self.roots = image.roots() | {
            CHUNK_TREE: image.super.chunk_root,
            ROOT_TREE: image.super.root,
        }

    def __enter__(self) -> Editor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def read(self, offset: int, length: int) -> bytearray:
        self._file.seek(offset)
        return bytearray(self._file.read(length))

    def write(self, offset: int, data: bytes | bytearray) -> None:
        self._file.seek(offset)
        self._file.write(data)
        self._file.flush()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def set_super(
        self,
        field: str,
        value: int | Callable[[int], int],
        *,
        mirrors: tuple[int, ...] = (0, 1, 2),
        at: int = 0,
        csum: bool = True,
    ) -> None:
        """``at``: bytes behind the field's own place."""
        offset, layout = SUPER[field]
        for mirror in mirrors:
            block = self.read(SUPER_OFFSETS[mirror], SUPER_BYTES)
            (before,) = struct.unpack_from("<" + layout, block, offset + at)
            after = value(before) if callable(value) else value
            struct.pack_into("<" + layout, block, offset + at, after)
            self.write(SUPER_OFFSETS[mirror], with_checksum(block) if csum else block)

    @contextmanager
    def block(self, bytenr: int, *, csum: bool = True) -> Iterator[bytearray]:
        """A tree block, written back when the ``with`` ends."""
        block = self.read(bytenr, self.node_bytes)
        yield block
        self.write(bytenr, with_checksum(block) if csum else block)

    def set_header(self, tree: int, field: str, value: int) -> None:
        offset, layout = HEADER[field]
        with self.block(self.roots[tree]) as block:
            struct.pack_into("<" + layout, block, offset, value)

    def leaf_of(self, tree: int, key: Key) -> int:
        """The address of the leaf that has the key, or would have it."""
        bytenr = self.roots[tree]
        while True:
            block = self.read(bytenr, self.node_bytes)
            count, level = struct.unpack_from("<IB", block, 96)
            if not level:
                return bytenr
            for slot in range(count):
                *found, child, _ = struct.unpack_from(
                    "<QBQQQ", block, HEADER_BYTES + slot * 33
                )
                if slot and tuple(found) > key:
                    break
                bytenr = child

    @contextmanager
    def items(self, tree: int, key: Key = (0, 0, 0)) -> Iterator[list[LeafItem]]:
        """The items of the leaf that has the key, written back, packed, in the order
        in which they are left.
        """
        with self.block(self.leaf_of(tree, key)) as block:
            items = []
            (count,) = struct.unpack_from("<I", block, 96)
            for slot in range(count):
                objectid, kind, offset, start, size = struct.unpack_from(
                    "<QBQII", block, HEADER_BYTES + slot * ITEM_BYTES
                )
                start += HEADER_BYTES
                data = block[start : start + size]
                items.append(LeafItem((objectid, kind, offset), data))
            yield items
            block[HEADER_BYTES:] = bytes(len(block) - HEADER_BYTES)
            struct.pack_into("<I", block, 96, len(items))
            end = len(block) - HEADER_BYTES
            for slot, item in enumerate(items):
                end -= len(item.data)
                struct.pack_into(
                    "<QBQII",
                    block,
                    HEADER_BYTES + slot * ITEM_BYTES,
                    *(*item.key, end, len(item.data)),
                )
                block[HEADER_BYTES + end : HEADER_BYTES + end + len(item.data)] = (
                    item.data
                )

    @contextmanager
    def item(self, tree: int, key: Key) -> Iterator[LeafItem]:
        with self.items(tree, key) as items:
            yield next(item for item in items if item.key == key)

    def delete(self, tree: int, key: Key) -> None:
        with self.items(tree, key) as items:
            items[:] = [item for item in items if item.key != key]

    def insert(self, tree: int, key: Key, data: bytes = b"") -> None:
        with self.items(tree, key) as items:
            items.append(LeafItem(key, bytearray(data)))
            items.sort(key=lambda item: item.key)
