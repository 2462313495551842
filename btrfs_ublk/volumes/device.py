"""A volume's block device: one of ``btrfs_ublk.device``, with the volume's name."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from btrfs_ublk.device import (
    Device,
    DeviceOptions,
    add_device,
    remove_device,
    show_device,
)
from btrfs_ublk.device.report import look_at
from btrfs_ublk.device.state import DeviceDirectory, device_directory
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.resources.btrfs import forget_device
from btrfs_ublk.server.description import Description, FileSegment
from btrfs_ublk.volumes.definition import VolumeDefinition
from btrfs_ublk.volumes.store import VolumeDirectory


def find_device(volume: VolumeDirectory, *, ask: bool = False) -> Device | None:
    """The volume's, if there is one; ``ask``: with its server's statistics."""
    directory = device_directory(volume.name)
    if not _is_of(directory, volume):
        return None
    return show_device(volume.name) if ask else look_at(directory)


def refuse_foreign_device(volume: VolumeDirectory) -> None:
    """Raise UsageError when the name is taken by a device that is none of a volume, or
    of another one.
    """
    directory = device_directory(volume.name)
    if os.path.lexists(directory.path) and not _is_of(directory, volume):
        raise UsageError(
            f"there is a device {volume.name!r} that is not of this volume",
            hint=f"see: btrfs-ublk device show {volume.name}; or choose another name",
        )


def make_device(volume: VolumeDirectory, definition: VolumeDefinition) -> Path:
    """Raises as add_device()."""
    device = add_device(
        volume.name,
        volume.description(definition),
        DeviceOptions(
            front_end=definition.front_end,
            realtime=definition.realtime,
            queues=definition.queues,
            depth=definition.depth,
        ),
    )
    assert device.path is not None
    return device.path


def drop_device(volume: VolumeDirectory) -> None:
    """Nothing happens when there is none. Raises LeftoverError while it is in use."""
    device = find_device(volume)
    if device is None:
        return
    if device.path is not None:
        forget(device.path)
    with suppress(UsageError):  # somebody else was quicker
        remove_device(volume.name)


def forget(path: Path) -> None:
    """Make btrfs forget an unmounted device. It does no harm when it fails: what it
    remembers goes with the next one that it is told of.
    """
    with suppress(BtrfsUblkError):
        forget_device(path)


def _is_of(directory: DeviceDirectory, volume: VolumeDirectory) -> bool:
    """Whether it serves the volume's seed."""
    try:
        description = Description.from_json(directory.description.read_text())
    except (OSError, ValueError, UsageError):
        return False
    seed = os.path.realpath(volume.seed_image)
    return any(
        isinstance(segment, FileSegment) and os.path.realpath(segment.path) == seed
        for segment in description.segments
    )
