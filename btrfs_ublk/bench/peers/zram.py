"""zram, the kernel's compressed RAM disk. What it holds here cannot be compressed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.bench.disks import disk_peers
from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.capabilities import ZRAM
from btrfs_ublk.resources.kernel_module import loaded_module
from btrfs_ublk.resources.zram import zram_device


@contextmanager
def _disk(setting: Setting, size_bytes: int) -> Iterator[Path]:
    if not Path(ZRAM.path).exists():
        setting.shared("zram", lambda: loaded_module("zram", {"num_devices": 0}))
    with zram_device(size_bytes) as path:
        yield path


PEERS = disk_peers("zram", "a zram device", _disk, ZRAM)
