"""The maps of devices, by the device's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from btrfs_ublk.device import control
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.lazy import MapClient


def device_map(name: str, *, path: str | None = None) -> MapClient:
    """A map of the device ``name``; ``path`` says which one, where it has several.

    Raises UsageError when there is no device of that name.
    """
    directory = device_directory(name)
    directory.check()
    return MapClient(_Asker(directory.path), path=path)


class _Asker:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(
        self, name: str, keys: dict[str, Any], *, fd: int | None, timeout_s: float
    ) -> dict[str, Any]:
        return control.ask(self._directory, name, keys, timeout_s=timeout_s, fd=fd)
