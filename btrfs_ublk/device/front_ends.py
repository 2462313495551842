"""Make the front end of a device."""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.device.front_end import DeviceFrontEnd
from btrfs_ublk.device.fuse import FuseDeviceFrontEnd
from btrfs_ublk.device.state import DeviceSpec, DeviceState
from btrfs_ublk.device.ublk import UblkDeviceFrontEnd


def front_end_of(
    spec: DeviceSpec, state: DeviceState, inherited: Sequence[int] = ()
) -> DeviceFrontEnd:
    """Make the front end of the device that ``spec`` describes. ``state`` is what is
    known of it. ``inherited`` are keep_open_fds of the supervisor before."""
    if spec.front_end == "ublk":
        return UblkDeviceFrontEnd(spec, state)
    return FuseDeviceFrontEnd(spec, state, inherited)
