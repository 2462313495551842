"""Kept volumes as objects, on top of the functions of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.paths import OptionalPath, StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.content import MapClient
from btrfs_ublk.device import device_map
from btrfs_ublk.device.state import check_name
from btrfs_ublk.errors import UsageError
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.device import find_device
from btrfs_ublk.volume.down import down_volume, remove_volume
from btrfs_ublk.volume.files import clone_in_volume
from btrfs_ublk.volume.report import KeptVolume, list_volumes, show_volume
from btrfs_ublk.volume.resize import resize_volume
from btrfs_ublk.volume.rollback import (
    remove_snapshot,
    rollback_volume,
    snapshot_volume,
    snapshots_of_volume,
)
from btrfs_ublk.volume.snapshots import VolumeSnapshot
from btrfs_ublk.volume.store import (
    FoundDefinition,
    find_definition,
    volume_directories,
    volume_directory,
)
from btrfs_ublk.volume.up import up_volume


@dataclass(frozen=True)
class NamedVolume:
    """A kept volume by name, whether it exists or not: ``Volumes().get()``.

    It keeps no state: each method does what the function does that it names.
    """

    name: str
    base: OptionalPath = OptionalPath()

    def exists(self) -> bool:
        """Whether there is such a volume, even a damaged one."""
        return volume_directory(self.name, self.base).is_volume()

    def definition(self) -> FoundDefinition:
        """Return its definition: see find_definition()."""
        return find_definition(self.name, base=self.base)

    def up(self, definition: VolumeDefinition | None = None) -> KeptVolume:
        """Mount it, and make it if there is none: see up_volume(). Without a
        definition, find_definition() chooses one.
        """
        return up_volume(
            self.name, definition or self.definition().definition, base=self.base
        )

    def down(self) -> bool:
        """Unmount it; its data stay. Returns False when down: see down_volume()."""
        return down_volume(self.name, base=self.base)

    def mounted(
        self, definition: VolumeDefinition | None = None
    ) -> AbstractContextManager[KeptVolume]:
        """Keep it up during ``with volume.mounted() as status:``: see kept_volume()."""
        return kept_volume(self.name, definition, base=self.base)

    def status(self) -> KeptVolume:
        """Return its state and its files: see show_volume()."""
        return show_volume(self.name, base=self.base)

    def clone(self, path: StrPath, *, offset: int, size_bytes: int) -> Path:
        """Clone a range of its virtual data into a new file: see clone_in_volume()."""
        return clone_in_volume(
            self.name, path, offset=offset, size_bytes=size_bytes, base=self.base
        )

    def map(self) -> MapClient:
        """Return the map of its server, while it is up: see device_map(). Raises
        UsageError when it has no device.
        """
        if find_device(volume_directory(self.name, self.base)) is None:
            raise UsageError(
                f"volume {self.name!r} has no device, and so no map to ask",
                hint=f"btrfs-ublk volume up {self.name}",
            )
        return device_map(self.name)

    def resize(self, writable_bytes: int) -> KeptVolume:
        """Grow its room for written data: see resize_volume()."""
        return resize_volume(self.name, writable_bytes, base=self.base)

    def snapshot(self, name: str) -> VolumeSnapshot:
        """Make a snapshot of it, while it is up: see snapshot_volume()."""
        return snapshot_volume(self.name, name, base=self.base)

    def snapshots(self) -> Sequence[VolumeSnapshot]:
        """Return its snapshots, while it is up: see snapshots_of_volume()."""
        return snapshots_of_volume(self.name, base=self.base)

    def remove_snapshot(self, name: str) -> None:
        """Remove a snapshot of it, while it is up: see remove_snapshot()."""
        remove_snapshot(self.name, name, base=self.base)

    def rollback(self, name: str) -> str:
        """Have it show what a snapshot has; return the name of the one that has what
        was before: see rollback_volume().
        """
        return rollback_volume(self.name, name, base=self.base)

    def remove(self) -> None:
        """Remove it with its data; it must be down: see remove_volume()."""
        remove_volume(self.name, base=self.base)


@dataclass(frozen=True)
class Volumes:
    """All kept volumes of the directory ``base`` (None: what BTRFS_UBLK_VOLUMES_DIR
    names, or /var/lib/btrfs-ublk/volumes). Iterating gives each volume, by name.
    """

    base: OptionalPath = OptionalPath()

    def get(self, name: str) -> NamedVolume:
        """Return the volume of that name, which ``up()`` makes when there is none.
        Raises UsageError for an invalid name.
        """
        return NamedVolume(check_name(name), self.base)

    def list(self) -> Sequence[KeptVolume]:
        """List the states of all of them, by name: see list_volumes()."""
        return list_volumes(base=self.base)

    def __iter__(self) -> Iterator[NamedVolume]:
        for directory in volume_directories(self.base):
            yield NamedVolume(directory.name, self.base)

    def __contains__(self, name: object) -> bool:
        return any(name in (volume, volume.name) for volume in self)


@contextmanager
def kept_volume(
    name: str,
    definition: VolumeDefinition | None = None,
    *,
    base: StrPath | None = None,
) -> Iterator[KeptVolume]:
    """Bring a volume up, and take it down at the end of the block; its data stay.

    Without a definition, find_definition() chooses one. NB: unlike volume(), it stays
    up when this process is killed.
    """
    if definition is None:
        definition = find_definition(name, base=base).definition
    is_up: list[bool] = []
    try:
        yield up_volume(name, definition, base=base, made=lambda: is_up.append(True))
    finally:
        if is_up:
            with deferred():
                down_volume(name, base=base)
