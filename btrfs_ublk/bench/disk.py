"""File systems that studies write to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.base.process import run
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.units import GIB

DISK_BYTES = 8 * GIB  # of a sparse file
#: ext4 would write its tables while others are measured.
_OPTIONS = {"ext4": (["-E", "nodiscard"], ["noinit_itable"]), "btrfs": ([], [])}


@contextmanager
def new_disk(kind: str, work: Path) -> Iterator[Path]:
    """Have one at work/KIND, on a loop device of a file."""
    image, target = work / f"{kind}.image", work / kind
    words, options = _OPTIONS[kind]
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    run([f"mkfs.{kind}", "-q", *words, image], timeout_s=60.0)
    with (
        loop_device(image) as device,
        mounted(device.path, target, fs_type=kind, options=options),
    ):
        yield target
