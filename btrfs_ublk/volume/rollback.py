"""Snapshots of a volume that is up, and rollbacks to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.undo import undoing
from btrfs_ublk.device.state import check_name
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.kernel.btrfs import (
    commit_transaction,
    create_deep_snapshot,
    delete_subvolumes,
    filesystem_uuid,
    set_read_only,
    subvolume_id,
)
from btrfs_ublk.kernel.mount import is_frozen
from btrfs_ublk.volume.cache import limit_cache
from btrfs_ublk.volume.down import take_down
from btrfs_ublk.volume.mounts import mounts_of
from btrfs_ublk.volume.report import mount_of
from btrfs_ublk.volume.snapshots import (
    SNAPSHOTS_DIRECTORY,
    VolumeSnapshot,
    can_have_snapshots,
    find_snapshot,
    half_path,
    list_snapshots,
    made_whole,
    opened_snapshots,
    plan_rollback,
    remove_half_snapshots,
)
from btrfs_ublk.volume.store import LOCK_TIMEOUT_S, VolumeDirectory, volume_directory
from btrfs_ublk.volume.trees import remove_half_tree
from btrfs_ublk.volume.up import bring_up


def snapshot_volume(
    name: str, snapshot: str, *, base: StrPath | None = None
) -> VolumeSnapshot:
    """Make a snapshot of a volume that is up, in no time, while others write to it. It
    is on disk when this returns, and is kept with the volume.

    Subvolumes in the volume, such as trees that were added, are in it as well, each as
    of a moment of its own. Raises UsageError for a name that cannot be, or is taken,
    and for a volume that can have no snapshots now, BtrfsUblkError.
    """
    check_name(snapshot, what="a snapshot")
    with _locked(name, base) as (_, mount), opened_snapshots(mount) as directory:
        if os.path.lexists(directory / snapshot):
            raise UsageError(
                f"volume {name!r} has a snapshot {snapshot!r}",
                hint="choose another name",
            )
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            with deferred(), made_whole(directory / snapshot) as half:
                create_deep_snapshot(mount, directory, half.name)
                set_read_only(half)
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot make snapshot {snapshot!r}: {error.strerror}",
                hint="were subvolumes in it moved meanwhile? try again",
            ) from error
        return find_snapshot(directory, snapshot)


def snapshots_of_volume(
    name: str, *, base: StrPath | None = None
) -> list[VolumeSnapshot]:
    """Return the snapshots of a volume that is up, the oldest first. Raises UsageError,
    BtrfsUblkError."""
    with _locked(name, base) as (_, mount):
        return list_snapshots(mount)


def remove_snapshot(name: str, snapshot: str, *, base: StrPath | None = None) -> None:
    """Remove a snapshot of a volume that is up. Raises UsageError when there is none of
    that name, LeftoverError while it is mounted, BtrfsUblkError."""
    with _locked(name, base) as (_, mount), opened_snapshots(mount) as directory:
        find_snapshot(directory, snapshot)
        place = PurePosixPath("/", SNAPSHOTS_DIRECTORY, snapshot)
        for one in mounts_of(filesystem_uuid(mount)):
            if one.root.is_relative_to(place):
                raise LeftoverError(
                    f"snapshot {snapshot!r} is mounted at {one.target}, and was not "
                    "removed",
                    hint=f"umount {one.target}",
                )
        with deferred():  # half of it is none any more
            half = (directory / snapshot).rename(half_path(directory))
            commit_transaction(directory)
            delete_subvolumes(half)


def rollback_volume(name: str, snapshot: str, *, base: StrPath | None = None) -> str:
    """Have a volume that is up show what a snapshot has, which stays; it goes down for
    that, and up again. What it had before is kept as another snapshot, whose name this
    returns.

    Raises LeftoverError while the volume is in use, and names the users, UsageError,
    BtrfsUblkError. The volume is as it was then. If it cannot come up, or this is
    killed, that is so, or the next up_volume() completes the rollback.
    """
    with _locked(name, base) as (volume, mount), ExitStack() as on_failure:
        definition, rollback = volume.definition(), plan_rollback(mount, snapshot)
        take_down(volume)
        on_failure.push(undoing(lambda: take_down(volume)))
        volume.write_rollback(rollback)
        bring_up(volume, definition)
        limit_cache(volume, definition)
        on_failure.pop_all()
        if subvolume_id(mount) == rollback.before:
            raise BtrfsUblkError(
                f"volume {name!r} was not rolled back, and is up as it was"
            )
    return rollback.kept


@contextmanager
def _locked(name: str, base: StrPath | None) -> Iterator[tuple[VolumeDirectory, Path]]:
    """Lock a volume that is up; yield it and its mount point. What killed commands have
    left is gone. Raises UsageError for one that can have no snapshots."""
    volume = volume_directory(name, base)
    volume.check()
    with volume.locked(timeout_s=LOCK_TIMEOUT_S):
        if volume.made().image is not None:
            raise UsageError(
                f"volume {name!r} was made of an image, and has forks, no snapshots",
                hint=f"btrfs-ublk image fork {name} FORK",
            )
        mount = mount_of(volume)
        if not can_have_snapshots(mount):
            raise UsageError(
                f"volume {name!r} was made by an early version, and its files are "
                "beside the virtual data: it can have no snapshots",
                hint="copy them to a new volume",
            )
        if is_frozen(mount):  # else this would wait
            raise LeftoverError(
                f"volume {name!r} is frozen", hint=f"fsfreeze --unfreeze {mount}"
            )
        remove_half_tree(volume, mount)
        remove_half_snapshots(mount)
        yield volume, mount
