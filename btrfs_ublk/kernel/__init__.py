"""Kernel resources: each has a context manager, to be used alone or with others."""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.kernel.beneath import exists_beneath, opened_directory
    from btrfs_ublk.kernel.loop import LoopDevice, loop_device
    from btrfs_ublk.kernel.mount import Mount, mounted
    from btrfs_ublk.kernel.mountinfo import MountInfo
    from btrfs_ublk.kernel.reflink import clone_file, clone_range
    from btrfs_ublk.kernel.temporary import tempdir
    from btrfs_ublk.kernel.ublk_devices import UblkDevice, list_ublk_devices
    from btrfs_ublk.kernel.waiting import wait_until
else:
    __getattr__ = exporter(__name__, __file__)
