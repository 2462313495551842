"""A kept volume that is up as long as a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.interrupts import deferred
from btrfs_ublk.volumes.definition import VolumeDefinition
from btrfs_ublk.volumes.down import down_volume
from btrfs_ublk.volumes.find import find_definition
from btrfs_ublk.volumes.report import KeptVolume
from btrfs_ublk.volumes.up import up_volume


@contextmanager
def kept_volume(
    name: str,
    definition: VolumeDefinition | None = None,
    *,
    base: Path | None = None,
) -> Iterator[KeptVolume]:
    """up_volume(), and down_volume() when the block is left; its data stay.

    Without a definition, as it was, or as find_definition() says. NB: unlike volume(),
    it stays up when this process is killed.
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
