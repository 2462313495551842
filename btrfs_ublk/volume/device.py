"""The block device of a volume: a ``btrfs_ublk.device`` with the volume's name."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from btrfs_ublk import device as devices
from btrfs_ublk.device.state import DeviceDirectory, device_directory
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.volume.definition import SETTINGS, VolumeDefinition
from btrfs_ublk.volume.mounts import device_names, forget
from btrfs_ublk.volume.store import VolumeDirectory


def find_device(volume: VolumeDirectory, *, ask: bool = False) -> devices.Device | None:
    """Return the volume's device, or None. ``ask`` adds statistics from its server."""
    directory = device_directory(volume.name)
    if not _is_of(directory, volume):
        return None
    if ask:
        return devices.show_device(volume.name)
    return devices.look_at(directory, users=False)


def refuse_foreign_device(volume: VolumeDirectory) -> None:
    """Raise UsageError when a device has the volume's name but belongs to another
    volume or to none.
    """
    directory = device_directory(volume.name)
    if os.path.lexists(directory.path) and not _is_of(directory, volume):
        raise UsageError(
            f"a device {volume.name!r} exists that does not belong to this volume",
            hint=f"see: btrfs-ublk device status {volume.name}; or choose another name",
        )


def refuse_removed_directory(volume: VolumeDirectory) -> None:
    """Raise BtrfsUblkError when the volume's directory was removed while the volume was
    up: no other volume may take its name, and its data vanish when it is unmounted.
    """
    directory = device_directory(volume.name)
    if os.path.lexists(volume.path) or not _is_of(directory, volume):
        return
    users = ", ".join(map(str, devices.look_at(directory).users)) or "not in use"
    raise BtrfsUblkError(
        f"{volume.path} was removed while volume {volume.name!r} was up: its data are"
        f" lost as soon as its device is no longer used (now it is {users})",
        hint=(
            "copy what is still needed from where it is mounted; then unmount it, and: "
            f"btrfs-ublk device down {volume.name}"
        ),
    )


def explain_devices(volume: VolumeDirectory, device: devices.Device) -> str | None:
    """Say which devices the mounted file system has got from other programs, as more
    or in place of the volume's; None if it has none. It may lack that of an image."""
    fsid, session = volume.fsid(), volume.session()
    if fsid is None or session is None or device.path is None:
        return None
    found, served = device_names(fsid), Path(os.path.realpath(device.path)).name
    loops = {path.name for path, file in loops_below(volume.path, among=found)}
    foreign = " ".join(sorted(f"/dev/{name}" for name in found - loops - {served}))
    if not found & loops:
        return (
            f"its file system has {foreign or 'no device'} in place of "
            f"{volume.sprout_image}, and cannot be mounted again so. Before it goes "
            f"down: losetup, and btrfs replace it back on {session.target}"
        )
    if foreign:
        return (
            f"its file system has {foreign}, which the volume does not know. Before it "
            f"goes down: btrfs device remove {foreign} {session.target}"
        )
    return None


def make_device(volume: VolumeDirectory, definition: VolumeDefinition) -> Path:
    """Make the volume's device and return its path. Raises as add_device() does."""
    device = devices.add_device(
        volume.name,
        volume.description(definition),
        devices.DeviceOptions(
            **{
                setting.name: getattr(definition, setting.name)
                for setting in SETTINGS.values()
                if setting.of_device
            }
        ),
    )
    assert device.path is not None
    return device.path


def drop_device(volume: VolumeDirectory) -> None:
    """Remove the device, if there is one. Raises LeftoverError while it is in use."""
    device = find_device(volume)
    if device is None:
        return
    if device.path is not None:
        forget(device.path)
    with suppress(UsageError):  # another process has removed it
        devices.remove_device(volume.name)


def _is_of(directory: DeviceDirectory, volume: VolumeDirectory) -> bool:
    """Whether the device serves the volume's seed."""
    seed = os.path.realpath(volume.seed_image)
    # NB: the class Description takes long to import, and most commands ask this.
    try:
        segments = json.loads(directory.description.read_text())["segments"]
        return any(
            each["kind"] == "file" and os.path.realpath(each["path"]) == seed
            for each in segments
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
