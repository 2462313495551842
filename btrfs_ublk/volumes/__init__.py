"""Kept volumes: lazy volumes with a name, whose data outlive commands and boots.

``btrfs_ublk.volume`` has those that live as long as a ``with`` block.
"""

from btrfs_ublk.volumes.clone import clone_in_volume
from btrfs_ublk.volumes.definition import (
    VolumeDefinition,
    parse_definition,
    read_definition,
)
from btrfs_ublk.volumes.down import down_volume, remove_volume
from btrfs_ublk.volumes.entry import VolumeFile
from btrfs_ublk.volumes.find import FoundDefinition, find_definition
from btrfs_ublk.volumes.kept import kept_volume
from btrfs_ublk.volumes.report import KeptFile, KeptVolume, list_volumes, show_volume
from btrfs_ublk.volumes.up import up_volume

__all__ = [
    "FoundDefinition",
    "KeptFile",
    "KeptVolume",
    "VolumeDefinition",
    "VolumeFile",
    "clone_in_volume",
    "down_volume",
    "find_definition",
    "kept_volume",
    "list_volumes",
    "parse_definition",
    "read_definition",
    "remove_volume",
    "show_volume",
    "up_volume",
]
