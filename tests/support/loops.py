"""Loop devices that tests attach and detach by losetup(8), and a btrfs on one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.base.process import run
from btrfs_ublk.kernel import loop_device, mounted, tempdir
from btrfs_ublk.kernel.uevents import wait_until


def backing_of(path: Path) -> str | None:
    file = Path("/sys/block") / path.name / "loop/backing_file"
    return file.read_text().strip() if file.exists() else None


def detach(path: Path) -> None:
    """Detach it and wait for that. losetup(8) does not while udev, say, has it open."""
    run(["losetup", "-d", path], timeout_s=30)
    wait_until(lambda: backing_of(path) is None, timeout_s=30, what="still attached")


@contextmanager
def new_btrfs(parent: Path, *, size_bytes: int) -> Iterator[Path]:
    """Yield the mount point of an empty btrfs, whose image is below ``parent``."""
    with tempdir(parent=parent) as directory:
        target = directory / "mnt"
        target.mkdir()
        image = directory / "image"
        with image.open("wb") as file:
            file.truncate(size_bytes)
        run(["mkfs.btrfs", "-q", image], timeout_s=60)
        with loop_device(image) as device, mounted(device.path, target) as mount:
            yield mount.target


def fill(directory: Path) -> Path:
    """The file that takes all the room that is left."""
    path = directory / "hog"
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return path
