"""Sprouts for benchmarks: a full-size seed image on a loop device, no block server.

What is measured here is the cost of btrfs itself; unread blocks cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.btrfs import filesystem_uuid, forget_device
from btrfs_ublk.kernel.loop import LoopDevice, loop_device
from btrfs_ublk.kernel.mount import Mount, mounted
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.seed import Seed, make_seed
from btrfs_ublk.units import GIB
from btrfs_ublk.volume.sprout import Sprout, sprout
from btrfs_ublk.volume.virtual_file import assert_mapping

#: Its file is sparse: only written data take memory.
WRITABLE_BYTES = 16 * GIB
_CHECK_TIMEOUT_S = 900.0


class Stopwatch:
    """``lap()`` returns the seconds since the last call."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def lap(self) -> float:
        now_s = time.monotonic()
        lap_s, self._last_s = now_s - self._last_s, now_s
        return lap_s


@dataclass(frozen=True)
class Bed:
    """A seed on a loop device, and paths for a sprout of it."""

    seed: Seed
    seed_device: LoopDevice
    target: Path
    writable_file: Path

    @contextmanager
    def sprouted(self) -> Iterator[Sprout]:
        """Make a new sprout, whose mapping is checked."""
        with sprout(
            self.seed_device.path,
            self.target,
            writable_file=self.writable_file,
            validate=lambda target: assert_mapping(self.seed, target),
        ) as made:
            yield made

    @contextmanager
    def reattached(self) -> Iterator[Path]:
        """Attach the former sprout's device without mounting it."""
        with loop_device(self.writable_file) as device:
            yield device.path

    @contextmanager
    def remounted(self, device: Path) -> Iterator[Mount]:
        """Mount the former sprout again."""
        try:
            options = [f"device={self.seed_device.path}"]
            with mounted(device, self.target, options=options) as mount:
                yield mount
        finally:
            with suppress(BtrfsUblkError):
                forget_device(device)


@contextmanager
def bed(
    parent: Path,
    *,
    virtual_data_size: int,
    chunk_bytes: int | None = None,
    writable_bytes: int = WRITABLE_BYTES,
    prepare: Callable[[Seed], None] = lambda seed: None,
) -> Iterator[Bed]:
    """Make a seed below ``parent``; ``prepare`` may write its virtual data."""
    with tempdir(parent=parent) as directory:
        seed = make_seed(
            directory / "seed.img",
            virtual_data_size=virtual_data_size,
            chunk_bytes=chunk_bytes,
        )
        prepare(seed)
        writable_file, target = directory / "writable.img", directory / "mount"
        with writable_file.open("xb") as file:
            file.truncate(writable_bytes)
        target.mkdir()
        with loop_device(seed.path, read_only=True) as device:
            yield Bed(seed, device, target, writable_file)


@contextmanager
def formatted_btrfs(
    device: Path, target: Path, *, options: Sequence[str] = ()
) -> Iterator[Mount]:
    """Format a device with the profiles of a sprout, and mount it."""
    profiles = ["--metadata=single", "--data=single"]
    run(["mkfs.btrfs", "--quiet", *profiles, device], timeout_s=60)
    try:
        with mounted(device, target, options=options) as mount:
            yield mount
    finally:
        with suppress(BtrfsUblkError):
            forget_device(device)


def metadata_used_bytes(target: Path) -> int:
    """Return the bytes of a mounted btrfs' tree blocks, counting copies once."""
    fsid = filesystem_uuid(target)
    path = Path(f"/sys/fs/btrfs/{fsid}/allocation/metadata/bytes_used")
    return int(path.read_text())


def check_file_system(device: Path) -> float:
    """Run btrfs check on an unmounted device; returns its seconds. Raises CommandError
    when it finds a fault.
    """
    watch = Stopwatch()
    run(["btrfs", "check", "--readonly", device], timeout_s=_CHECK_TIMEOUT_S)
    return watch.lap()
