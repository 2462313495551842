"""Where the definition of a volume is: in /etc, or kept with its data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.volumes.definition import VolumeDefinition, read_definition
from btrfs_ublk.volumes.store import volume_directory

#: BTRFS_UBLK_CONFIG_DIR names another one.
CONFIG_VARIABLE = "BTRFS_UBLK_CONFIG_DIR"
CONFIG_DIRECTORY = "/etc/btrfs-ublk"


@dataclass(frozen=True)
class FoundDefinition:
    """``file`` is the administrator's; None: the volume's own, or the defaults."""

    definition: VolumeDefinition
    file: Path | None


def find_definition(name: str, *, base: Path | None = None) -> FoundDefinition:
    """What says how a volume is to be: /etc/btrfs-ublk/volumes/NAME.toml, else what it
    was when it was last brought up, else the defaults. Raises UsageError.
    """
    volume = volume_directory(name, base)
    config = Path(os.environ.get(CONFIG_VARIABLE) or CONFIG_DIRECTORY)
    file = config / "volumes" / f"{name}.toml"
    if file.exists():
        return FoundDefinition(read_definition(file), file)
    if os.path.lexists(volume.path):
        volume.check()
        return FoundDefinition(volume.definition(), None)
    return FoundDefinition(VolumeDefinition(), None)
