"""Kept volumes: lazy volumes with a name, whose data outlive commands and boots.

``btrfs_ublk.volume.temporary`` has those that live as long as a ``with`` block.
"""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.volume.access import Access
    from btrfs_ublk.volume.clone import clone_in_volume, unmapped_bytes
    from btrfs_ublk.volume.commit import apply_delta, commit_fork, write_delta
    from btrfs_ublk.volume.definition import (
        SETTINGS,
        VolumeDefinition,
        parse_definition,
        read_definition,
    )
    from btrfs_ublk.volume.detach import Detached, detach_image
    from btrfs_ublk.volume.down import down_volume, may_be_up, remove_volume
    from btrfs_ublk.volume.entry import VolumeFile
    from btrfs_ublk.volume.find import FoundDefinition, find_definition
    from btrfs_ublk.volume.forks import DEFAULT_FORK_MODE, FORK_MODES, Fork, ForkMode
    from btrfs_ublk.volume.image import fork_image, forks_of_image, unfork_image
    from btrfs_ublk.volume.kept import kept_volume
    from btrfs_ublk.volume.make import remove_halves
    from btrfs_ublk.volume.report import (
        KeptFile,
        KeptVolume,
        list_volumes,
        show_volume,
    )
    from btrfs_ublk.volume.resize import resize_volume
    from btrfs_ublk.volume.settings import Setting
    from btrfs_ublk.volume.store import (
        volume_directories,
        volume_directory,
        volumes_directory,
    )
    from btrfs_ublk.volume.trees import AddedTree, add_image, add_tree
    from btrfs_ublk.volume.up import up_volume
    from btrfs_ublk.volume.volumes import NamedVolume, Volumes
else:
    __getattr__ = exporter(
        __name__,
        {
            "access": "Access",
            "clone": "clone_in_volume unmapped_bytes",
            "commit": "apply_delta commit_fork write_delta",
            "definition": (
                "SETTINGS VolumeDefinition parse_definition read_definition"
            ),
            "detach": "Detached detach_image",
            "down": "down_volume may_be_up remove_volume",
            "entry": "VolumeFile",
            "find": "FoundDefinition find_definition",
            "forks": "DEFAULT_FORK_MODE FORK_MODES Fork ForkMode",
            "image": "fork_image forks_of_image unfork_image",
            "kept": "kept_volume",
            "make": "remove_halves",
            "report": "KeptFile KeptVolume list_volumes show_volume",
            "resize": "resize_volume",
            "settings": "Setting",
            "store": "volume_directories volume_directory volumes_directory",
            "trees": "AddedTree add_image add_tree",
            "up": "up_volume",
            "volumes": "NamedVolume Volumes",
        },
    )

__all__ = [
    "Access",
    "AddedTree",
    "DEFAULT_FORK_MODE",
    "Detached",
    "FORK_MODES",
    "Fork",
    "ForkMode",
    "FoundDefinition",
    "KeptFile",
    "KeptVolume",
    "NamedVolume",
    "SETTINGS",
    "Setting",
    "VolumeDefinition",
    "VolumeFile",
    "Volumes",
    "add_image",
    "add_tree",
    "apply_delta",
    "clone_in_volume",
    "commit_fork",
    "detach_image",
    "down_volume",
    "find_definition",
    "fork_image",
    "forks_of_image",
    "kept_volume",
    "list_volumes",
    "may_be_up",
    "parse_definition",
    "read_definition",
    "remove_halves",
    "remove_volume",
    "resize_volume",
    "show_volume",
    "unfork_image",
    "unmapped_bytes",
    "up_volume",
    "volume_directories",
    "volume_directory",
    "volumes_directory",
    "write_delta",
]
