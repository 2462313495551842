"""brd, the kernel's plain RAM disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.bench.disks import disk_peers
from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.capabilities import LoadableModule
from btrfs_ublk.resources import blockdev
from btrfs_ublk.resources.kernel_module import loaded_module
from btrfs_ublk.units import GIB, KIB

#: A disk takes the memory that is written, and keeps it until the module goes.
_DISKS, _DISK_BYTES = 4, 64 * GIB
_TIMEOUT_S = 10.0


@contextmanager
def _all_disks() -> Iterator[list[Path]]:
    """Those that nobody has taken yet."""
    with loaded_module("brd", {"rd_nr": _DISKS, "rd_size": _DISK_BYTES // KIB}):
        disks = [Path(f"/dev/ram{number}") for number in range(_DISKS)]
        blockdev.wait_for_node(disks[-1], timeout_s=_TIMEOUT_S)
        yield disks


@contextmanager
def _disk(setting: Setting, size_bytes: int) -> Iterator[Path]:
    yield setting.shared("brd", _all_disks).pop()


PEERS = disk_peers("brd", "a brd RAM disk", _disk, LoadableModule("brd"))
