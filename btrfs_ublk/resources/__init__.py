"""Kernel resources: one context manager each, usable alone and composed."""

from btrfs_ublk.resources.cgroup import MemoryGroup, memory_group
from btrfs_ublk.resources.kernel_module import loaded_module
from btrfs_ublk.resources.loop import LoopDevice, loop_device
from btrfs_ublk.resources.mount import Mount, mounted
from btrfs_ublk.resources.nbd import connected_nbd
from btrfs_ublk.resources.reflink import clone_file, clone_range
from btrfs_ublk.resources.tempdir import tempdir
from btrfs_ublk.resources.ublk_devices import UblkDevice, list_ublk_devices
from btrfs_ublk.resources.zram import zram_device

__all__ = [
    "LoopDevice",
    "MemoryGroup",
    "Mount",
    "UblkDevice",
    "clone_file",
    "clone_range",
    "connected_nbd",
    "list_ublk_devices",
    "loaded_module",
    "loop_device",
    "memory_group",
    "mounted",
    "tempdir",
    "zram_device",
]
