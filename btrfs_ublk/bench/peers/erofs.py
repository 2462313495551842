"""EROFS, uncompressed, on tmpfs: on loop devices and on the file itself; overlayfs and
composefs, which stand on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.read_only import (
    EROFS,
    EXT4,
    MKCOMPOSEFS,
    MKFS_EROFS,
    MKFS_EXT4,
    MOUNT_COMPOSEFS,
    OVERLAY,
    MountErofs,
    composefs,
    erofs_on_file,
    erofs_on_loop,
    host_erofs,
    make_composefs,
    make_erofs,
    overlay,
)
from btrfs_ublk.bench.stamps import STAMPS
from btrfs_ublk.capabilities import LOOP, ROOT, Capability
from btrfs_ublk.units import MIB

_NAME = "file"
_EXT4_BYTES = 64 * MIB


def _tree(setting: Setting) -> Path:
    """A directory with the source file, and nothing else."""
    tree = setting.new_directory("tree")
    os.link(setting.source_file(), tree / _NAME)
    return tree


def _image(setting: Setting) -> Path:
    """An image with the source file, for those who only read it."""
    return setting.shared("erofs image", lambda: _new_image(setting))


@contextmanager
def _new_image(setting: Setting) -> Iterator[Path]:
    image = setting.new_directory("image") / "erofs.img"
    make_erofs(_tree(setting), image)
    yield image


@dataclass(frozen=True)
class Erofs:
    name: str
    description: str
    mount: MountErofs

    layer: ClassVar[Literal["file"]] = "file"
    needs: ClassVar[Sequence[Capability]] = (ROOT, LOOP, EROFS, MKFS_EROFS)

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        target = setting.new_directory("mnt")
        with self.mount(_image(setting), target):
            yield Subject(target / _NAME, STAMPS)


@dataclass(frozen=True)
class ErofsOnFile:
    """NB: it reads through the page cache, whatever it is asked."""

    name: ClassVar[str] = "erofs-file"
    description: ClassVar[str] = "a file of EROFS on a file of ext4, no device"
    layer: ClassVar[Literal["file"]] = "file"
    needs: ClassVar[Sequence[Capability]] = (*Erofs.needs, EXT4, MKFS_EXT4)

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        host, target = map(setting.new_directory, ("host", "mnt"))
        # ext4 keeps a part for itself, and for root.
        with setting.new_file(2 * setting.size_bytes + _EXT4_BYTES) as disk:
            host_erofs(_image(setting), disk, host)
            with erofs_on_file(disk, host, target):
                yield Subject(target / _NAME, STAMPS, direct=False)


@dataclass(frozen=True)
class OverlayErofs:
    """To write copies the whole file up, once."""

    name: ClassVar[str] = "overlay-erofs"
    description: ClassVar[str] = "a file of overlayfs, on EROFS on a loop device"
    layer: ClassVar[Literal["file"]] = "file"
    needs: ClassVar[Sequence[Capability]] = (*Erofs.needs, OVERLAY)

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        lower, upper, target = map(setting.new_directory, ("lower", "upper", "mnt"))
        with erofs_on_loop(_image(setting), lower, direct_io=False):
            with overlay(lower, upper, target):
                # What is written is on tmpfs.
                direct = not setting.writable
                yield Subject(target / _NAME, STAMPS, direct=direct, writable=True)


@dataclass(frozen=True)
class Composefs:
    name: ClassVar[str] = "composefs"
    description: ClassVar[str] = "a file of composefs; its contents on tmpfs"
    layer: ClassVar[Literal["file"]] = "file"
    needs: ClassVar[Sequence[Capability]] = (
        *(ROOT, EROFS, OVERLAY),
        *(MKCOMPOSEFS, MOUNT_COMPOSEFS),
    )

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        store, images, target = map(setting.new_directory, ("store", "image", "mnt"))
        make_composefs(_tree(setting), images / "composefs.img", store)
        with composefs(images / "composefs.img", store, target):
            yield Subject(target / _NAME, STAMPS, direct=False)


PEERS: Sequence[Peer] = [
    Erofs(
        "erofs-loop",
        "a file of EROFS on a loop device",
        partial(erofs_on_loop, direct_io=False),
    ),
    Erofs(
        "erofs-loop-direct",
        "a file of EROFS on a loop device with direct I/O",
        partial(erofs_on_loop, direct_io=True),
    ),
    ErofsOnFile(),
    OverlayErofs(),
    Composefs(),
]
