"""Block devices that outlive the command that made them, and their servers."""

from btrfs_ublk.device.collect import Collected, collect_devices
from btrfs_ublk.device.lifecycle import (
    DeviceOptions,
    add_device,
    recover_device,
    remove_device,
    serve_device,
)
from btrfs_ublk.device.maps import device_map
from btrfs_ublk.device.report import Device, list_devices, show_device
from btrfs_ublk.device.state import DeviceSpec, DeviceState, StateError
from btrfs_ublk.device.supervised import supervised_device
from btrfs_ublk.device.upgrade import update_device, upgrade_device

__all__ = [
    "Collected",
    "Device",
    "DeviceOptions",
    "DeviceSpec",
    "DeviceState",
    "StateError",
    "add_device",
    "collect_devices",
    "device_map",
    "list_devices",
    "recover_device",
    "remove_device",
    "serve_device",
    "show_device",
    "supervised_device",
    "update_device",
    "upgrade_device",
]
