"""Finding the definition of a volume: in /etc, or kept with its data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.private_dirs import CONFIG_DIRECTORY, CONFIG_VARIABLE
from btrfs_ublk.errors import UsageError
from btrfs_ublk.volume.definition import VolumeDefinition, read_definition
from btrfs_ublk.volume.store import volume_directory


@dataclass(frozen=True)
class FoundDefinition:
    """``file`` is the administrator's; None for the volume's own, or the defaults
    (``is_default``), which are those of a volume that nobody has defined."""

    definition: VolumeDefinition
    file: Path | None
    is_default: bool = False


def find_definition(name: str, *, base: StrPath | None = None) -> FoundDefinition:
    """Find the definition of a volume: /etc/btrfs-ublk/volumes/NAME.toml, else the one
    it was last brought up with, else the defaults. Raises UsageError.
    """
    volume = volume_directory(name, base)
    config = Path(os.environ.get(CONFIG_VARIABLE) or CONFIG_DIRECTORY)
    file = config / "volumes" / f"{name}.toml"
    if file.exists():
        return FoundDefinition(read_definition(file), file)
    if os.path.lexists(volume.path):
        volume.check()
        return FoundDefinition(volume.definition(), None)
    return FoundDefinition(VolumeDefinition(), None, is_default=True)


def find_own_definition(name: str, *, base: StrPath | None = None) -> VolumeDefinition:
    """Find a volume's definition to change it. Raises UsageError, also for the
    administrator's."""
    found = find_definition(name, base=base)
    if found.file is not None:
        raise UsageError(
            f"volume {name!r} is defined in {found.file}, which this command cannot "
            "change",
            hint=f"write it there, then: btrfs-ublk volume up {name}",
        )
    return found.definition
