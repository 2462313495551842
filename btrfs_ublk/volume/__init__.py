"""Kept volumes: lazy volumes with a name, whose data outlive commands and boots.

``btrfs_ublk.volume.temporary`` has those that live as long as a ``with`` block.
"""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.volume.begin import up_volume
    from btrfs_ublk.volume.commit import (
        apply_delta,
        commit_fork,
        diff_fork,
        write_delta,
    )
    from btrfs_ublk.volume.definition import (
        DEFAULT_FORK_MODE,
        FORK_MODES,
        SETTINGS,
        ForkMode,
        Setting,
        VolumeDefinition,
        parse_definition,
        read_definition,
    )
    from btrfs_ublk.volume.down import down_volume, may_be_up, remove_volume
    from btrfs_ublk.volume.entry import Access, VolumeFile, VolumeTree
    from btrfs_ublk.volume.files import (
        add_file,
        clone_in_volume,
        remove_file,
        unmapped_bytes,
    )
    from btrfs_ublk.volume.forks import Fork
    from btrfs_ublk.volume.image import (
        ensure_fork,
        fork_image,
        forks_of_image,
        unfork_image,
    )
    from btrfs_ublk.volume.listing import ListedFile, Listing, read_listing
    from btrfs_ublk.volume.report import (
        KeptFile,
        KeptVolume,
        VolumeSnapshot,
        list_volumes,
        show_volume,
    )
    from btrfs_ublk.volume.resize import Detached, detach_image, resize_volume
    from btrfs_ublk.volume.run import find_volume_of, run_in_image
    from btrfs_ublk.volume.snapshots import (
        remove_snapshot,
        snapshot_volume,
        snapshots_of_volume,
    )
    from btrfs_ublk.volume.store import (
        FoundDefinition,
        find_definition,
        remove_halves,
        volume_directories,
        volume_directory,
        volumes_directory,
    )
    from btrfs_ublk.volume.traced_run import trace_run
    from btrfs_ublk.volume.trees import AddedTree, add_image, add_tree
    from btrfs_ublk.volume.up import rollback_volume
    from btrfs_ublk.volume.volumes import NamedVolume, Volumes, kept_volume
else:
    __getattr__ = exporter(__name__, __file__)
