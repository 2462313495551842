"""File systems that are made for a measurement, and what they need."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.capabilities import FileSystem, Program
from btrfs_ublk.base.process import run
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.btrfs import forget_device
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted

EROFS = FileSystem("erofs")
OVERLAY = FileSystem("overlay")
MKFS_EROFS = Program("mkfs.erofs", "erofs-utils")

_MKFS_TIMEOUT_S = 300.0


def make_erofs(source: Path, image: Path, *options: str) -> None:
    """Make an image of a directory, uncompressed by default. Raises CommandError."""
    argv: list[str | Path] = ["mkfs.erofs", "--quiet", *options, image, source]
    run(argv, timeout_s=_MKFS_TIMEOUT_S)


@contextmanager
def on_loop(
    image: Path, target: Path, *, fs_type: str, read_only: bool = False
) -> Iterator[None]:
    """Mount an image over a loop device."""
    with loop_device(image, read_only=read_only) as device:
        with mounted(device.path, target, fs_type=fs_type, read_only=read_only):
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


@contextmanager
def formatted_btrfs(
    device: Path, target: Path, *, options: Sequence[str] = ()
) -> Iterator[None]:
    """Format a device with the profiles of a sprout, and mount it."""
    profiles = ["--metadata=single", "--data=single"]
    run(["mkfs.btrfs", "--quiet", *profiles, device], timeout_s=_MKFS_TIMEOUT_S)
    with forgotten(device), mounted(device, target, options=options):
        yield


@contextmanager
def forgotten(device: Path) -> Iterator[None]:
    """Make btrfs forget a device at the end, when it is no longer mounted."""
    try:
        yield
    finally:
        with suppress(BtrfsUblkError):
            forget_device(device)


@deferred()
def sync_file_system(directory: Path) -> float:
    """Call syncfs(2), which Python lacks; returns the seconds it took."""
    library = ctypes.CDLL(None, use_errno=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        begin_s = time.monotonic()
        if library.syncfs(fd):
            number = ctypes.get_errno()
            raise BtrfsUblkError(f"syncfs {directory}: {os.strerror(number)}")
        return time.monotonic() - begin_s
    finally:
        os.close(fd)
