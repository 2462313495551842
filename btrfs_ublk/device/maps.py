"""Find the maps of a device by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.content import MapClient
from btrfs_ublk.device import control
from btrfs_ublk.device.state import DeviceDirectory, device_directory
from btrfs_ublk.errors import UsageError
from btrfs_ublk.server.description import Description, LazySegment


def device_map(name: str, *, path: StrPath | None = None) -> MapClient:
    """Return a map of the device ``name``; ``path`` says which, if it has several.

    Raises UsageError when there is no device of that name, or it has no map.
    """
    directory = device_directory(name)
    directory.check()
    if not _may_have_maps(directory):
        raise UsageError(
            f"device {name!r} has no map: none of its segments is lazy",
            hint="btrfs-ublk seed create --description … --map … makes one",
        )
    return MapClient(_Asker(directory.path), path=path)


def _may_have_maps(directory: DeviceDirectory) -> bool:
    try:
        description = Description.from_json(directory.description.read_text())
    except (OSError, ValueError, UsageError):
        return True  # The server's error will say what is wrong.
    return any(isinstance(one, LazySegment) for one in description.segments)


class _Asker:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(
        self, name: str, keys: dict[str, Any], *, fd: int | None, timeout_s: float
    ) -> dict[str, Any]:
        return control.ask(self._directory, name, keys, timeout_s=timeout_s, fd=fd)
