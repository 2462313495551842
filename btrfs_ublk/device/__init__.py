"""Block devices that outlive the command that made them, and their servers."""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.device.collect import Collected, collect_devices, collect_half_made
    from btrfs_ublk.device.lifecycle import (
        DeviceOptions,
        add_device,
        have_device,
        recover_device,
        remove_device,
        serve_device,
        supervised_device,
    )
    from btrfs_ublk.device.maps import device_map
    from btrfs_ublk.device.report import Device, list_devices, look_at, show_device
    from btrfs_ublk.device.state import (
        DeviceSpec,
        DeviceState,
        StateError,
        device_directories,
        device_directory,
    )
    from btrfs_ublk.device.upgrade import update_device, upgrade_device
else:
    __getattr__ = exporter(__name__, __file__)
