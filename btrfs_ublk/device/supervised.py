"""Make a device that outlives its server, but not a ``with`` block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.lifecycle import (
    DEFAULT_OPTIONS,
    DeviceOptions,
    add_device,
    remove_device,
)
from btrfs_ublk.device.report import Device
from btrfs_ublk.server.description import Description


@contextmanager
def supervised_device(
    description: Description,
    options: DeviceOptions = DEFAULT_OPTIONS,
    *,
    name: str | None = None,
) -> Iterator[Device]:
    """Call add_device(), and remove the device when the block is left.

    ``device.path`` is what sprout() takes. ``name`` is random by default. NB: unlike
    BlockServer, it stays when this process is killed: see ``btrfs-ublk device list``.
    """
    name = name or f"anonymous-{os.urandom(4).hex()}"
    is_there: list[bool] = []
    try:
        yield add_device(name, description, options, made=lambda: is_there.append(True))
    finally:
        if is_there:
            with deferred():
                remove_device(name)
