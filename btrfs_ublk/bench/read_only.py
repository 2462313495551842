"""EROFS and overlayfs of a directory, and what further file systems need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.base.capabilities import FileSystem, Program
from btrfs_ublk.base.process import run
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted

EROFS = FileSystem("erofs")
OVERLAY = FileSystem("overlay")
EXT4 = FileSystem("ext4")
MKFS_EROFS = Program("mkfs.erofs", "erofs-utils")
MKFS_EXT4 = Program("mkfs.ext4", "e2fsprogs")

_MKFS_TIMEOUT_S = 300.0


def make_erofs(source: Path, image: Path) -> None:
    """Make an uncompressed image of a directory. Raises CommandError."""
    run(["mkfs.erofs", "--quiet", image, source], timeout_s=_MKFS_TIMEOUT_S)


@contextmanager
def erofs_on_loop(image: Path, target: Path, *, direct_io: bool) -> Iterator[None]:
    with loop_device(image, read_only=True, direct_io=direct_io) as device:
        with mounted(device.path, target, fs_type="erofs", read_only=True):
            yield


@contextmanager
def overlay(lower: Path, upper: Path, target: Path) -> Iterator[None]:
    """Mount overlayfs; ``upper`` is an empty directory for written data."""
    for name in ("files", "work"):
        (upper / name).mkdir()
    options = [
        f"lowerdir={lower}",
        f"upperdir={upper / 'files'}",
        f"workdir={upper / 'work'}",
    ]
    with mounted("overlay", target, fs_type="overlay", options=options):
        yield
