"""A kept volume that is up for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.down import down_volume
from btrfs_ublk.volume.find import find_definition
from btrfs_ublk.volume.report import KeptVolume
from btrfs_ublk.volume.up import up_volume


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
