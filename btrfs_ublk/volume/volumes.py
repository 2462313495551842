"""Kept volumes as objects, on top of the functions of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from btrfs_ublk.base.paths import OptionalPath, StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.content import MapClient
from btrfs_ublk.device import device_map
from btrfs_ublk.device.state import check_name
from btrfs_ublk.errors import UsageError
from btrfs_ublk.volume.begin import up_volume
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.device import find_device
from btrfs_ublk.volume.down import down_volume, remove_volume
from btrfs_ublk.volume.files import clone_in_volume
from btrfs_ublk.volume.report import KeptVolume, list_volumes, show_volume
from btrfs_ublk.volume.resize import resize_volume
from btrfs_ublk.volume.snapshots import (
    remove_snapshot,
    snapshot_volume,
    snapshots_of_volume,
)
from btrfs_ublk.volume.store import (
    find_definition,
    volume_directories,
    volume_directory,
)
from btrfs_ublk.volume.up import rollback_volume

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
    is_up: list[bool] = []
    try:
        yield up_volume(name, definition, base=base, made=lambda: is_up.append(True))
    finally:
        if is_up:
            with deferred():
                down_volume(name, base=base)


def _method(
    function: Callable[Concatenate[str, _P], _R],
) -> Callable[Concatenate[NamedVolume, _P], _R]:
    """Make a method of a function that gets the name of a volume, and ``base``."""

    @wraps(function)
    def method(self: NamedVolume, /, *args: _P.args, **keys: _P.kwargs) -> _R:
        keys.setdefault("base", self.base)
        return function(self.name, *args, **keys)

    return method


@dataclass(frozen=True)
class NamedVolume:
    """A kept volume by name, whether it exists or not: ``Volumes().get()``.

    It keeps no state: each method is the function that it is made of.
    """

    name: str
    base: OptionalPath = OptionalPath()

    definition = _method(find_definition)
    up = _method(up_volume)
    down = _method(down_volume)
    mounted = _method(kept_volume)
    status = _method(show_volume)
    clone = _method(clone_in_volume)
    resize = _method(resize_volume)
    snapshot = _method(snapshot_volume)
    snapshots = _method(snapshots_of_volume)
    remove_snapshot = _method(remove_snapshot)
    rollback = _method(rollback_volume)
    remove = _method(remove_volume)

    def exists(self) -> bool:
        """Whether there is such a volume, even a damaged one."""
        return volume_directory(self.name, self.base).is_volume()

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
