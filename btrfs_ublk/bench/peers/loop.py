"""The kernel's loop device on a file on tmpfs, buffered and direct."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.bench.disks import Disk, disk_peers
from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.capabilities import LOOP
from btrfs_ublk.resources.loop import loop_device


def _disk(direct_io: bool) -> Disk:
    @contextmanager
    def disk(setting: Setting, size_bytes: int) -> Iterator[Path]:
        with setting.new_file(size_bytes) as path:
            with loop_device(path, direct_io=direct_io) as device:
                yield device.path

    return disk


PEERS = [
    *disk_peers("loop", "a loop device on tmpfs", _disk(False), LOOP),
    *disk_peers("loop-direct", "a loop device with direct I/O", _disk(True), LOOP),
]
