"""What the tests of btrfs-ublk-reshape share: images as mkfs.btrfs and the kernel make
them, and running it.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import btrfs_image as fmt
from support.sanitized_build import SANITIZER_ENVIRONMENT

from btrfs_ublk.base.process import run
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.kernel.attributes import NO_COW, add_attributes

GIB = 1 << 30
BLOCK = 4096
NODE = 16384
START = 512 * GIB
#: 640 extents of 256 MiB, in more than three leaves.
SIZE = 160 * GIB
DEVICE = START + SIZE
FILENAME = "virtual"
INODE = 257
SEEDING = 1 << 32
_TIMEOUT_S = 60


class Reshape:
    """The tool, of one build."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def __call__(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *args],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=os.environ | SANITIZER_ENVIRONMENT,
        )

    def seed(self, image: Path, *args: str, inode: int = INODE) -> dict[str, Any]:
        done = self("seed", f"--inode={inode}", "--json", *args, image)
        assert (done.returncode, done.stderr) == (0, "")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def refused(self, image: Path, *args: str, inode: int = INODE) -> str:
        """Why; asserts that the image is as before."""
        before = list(fmt.data_bytes(image)) if image.is_file() else None
        done = self("seed", f"--inode={inode}", *args, image)
        assert done.returncode == 2, (done.returncode, done.stderr)
        assert done.stdout == ""
        if before is not None:
            assert list(fmt.data_bytes(image)) == before
        return done.stderr


def make_sparse(path: Path, size_bytes: int) -> Path:
    with path.open("xb") as file:
        file.truncate(size_bytes)
    return path


def make_btrfs(path: Path, *options: str, size_bytes: int = DEVICE) -> Path:
    make_sparse(path, size_bytes)
    argv = ["mkfs.btrfs", "-q", "-K", "-m", "single", "-d", "single"]
    run([*argv, *options, path], timeout_s=_TIMEOUT_S)
    return path


@contextmanager
def mounted_image(image: Path, options: Sequence[str] = ()) -> Iterator[Path]:
    target = image.with_name(image.name + ".mount")
    target.mkdir()
    try:
        with (
            loop_device(image) as loop,
            mounted(loop.path, target, options=["nodiscard", *options]),
        ):
            yield target
    finally:
        target.rmdir()


def allocate(path: Path, size_bytes: int) -> None:
    with path.open("xb", buffering=0) as file:
        add_attributes(file.fileno(), NO_COW)
        os.posix_fallocate(file.fileno(), 0, size_bytes)


def make_preallocated(path: Path, reshape: Reshape) -> Path:
    """With a file of SIZE bytes in preallocated extents, its data from START on."""
    make_btrfs(path)
    done = reshape("stretch", f"--offset={START}", f"--length={SIZE}", path)
    assert (done.returncode, done.stderr) == (0, "")
    with mounted_image(path) as target:
        allocate(target / FILENAME, SIZE)
    return path


def copy_sparse(source: Path, target: Path) -> Path:
    run(["cp", "--sparse=always", "--", source, target], timeout_s=_TIMEOUT_S)
    return target


def _make_crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _make_crc_table()


def with_checksum(block: bytes | bytearray) -> bytes:
    """A tree block or superblock with its crc32c redone."""
    crc = 0xFFFFFFFF
    for byte in block[32:]:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return struct.pack("<I28x", crc ^ 0xFFFFFFFF) + bytes(block[32:])


def tree_blocks(path: Path) -> dict[int, fmt.Block]:
    """All of them by address, which is the offset in the image."""
    with path.open("rb") as file:
        image = fmt.Image(file)
        list(image.items(image.super.chunk_root))
        for root in image.roots().values():
            list(image.items(root))
        return {block.bytenr: block for block in image.blocks}


def read_at(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def extent_types(path: Path) -> list[int]:
    """Of the virtual file: 1 regular, 2 preallocated."""
    with path.open("rb") as file:
        image = fmt.Image(file)
        items = image.items(image.roots()[fmt.FS_TREE])
        return [
            item.data[20] for item in items if item.key[:2] == (INODE, fmt.EXTENT_DATA)
        ]
