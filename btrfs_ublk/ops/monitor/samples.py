"""All devices at one moment, with their servers' statistics."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from btrfs_ublk.device import Device, list_devices, show_device
from btrfs_ublk.device.state import RUN_DIRECTORY, RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server import ServerStats

if TYPE_CHECKING:
    from btrfs_ublk.containers.status import Status

#: Each hanging server takes seconds, so they are asked in parallel.
_THREADS = 16


@dataclass(frozen=True)
class Sample:
    """``stats`` is None if the server gave no valid ones."""

    device: Device
    stats: ServerStats | None


def take_samples() -> list[Sample]:
    """Sample all devices by name. Takes as long as the slowest server, about 5 s."""
    names = [device.name for device in list_devices()]
    if not names:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(names))) as pool:
        found = list(pool.map(_take_sample, names))
    return [sample for sample in found if sample is not None]


def _take_sample(name: str) -> Sample | None:
    try:
        device = show_device(name)
    except BtrfsUblkError:
        return None  # it was removed meanwhile
    stats = None
    if device.stats is not None:
        try:
            stats = ServerStats.parse(device.stats)
        except BtrfsUblkError:
            pass  # a server of another version
    return Sample(device, stats)


def ask_snapshotter() -> Status | None:
    """Return the status of the snapshotter at its usual socket; None when there is
    none, or when it does not answer within ten seconds."""
    socket = Path(os.environ.get(RUN_VARIABLE) or RUN_DIRECTORY, "snapshotter.sock")
    if not socket.exists():
        return None
    try:
        from btrfs_ublk.containers.status import ask

        return ask(socket)
    except (ImportError, BtrfsUblkError):
        return None
