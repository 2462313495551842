"""Snapshots of volumes, in the top level of a volume's btrfs. Its users see none of it,
as what is mounted is a subvolume there.

    files                  what is mounted, until the first rollback
    snapshots/NAME         snapshots
    snapshots/.root-…      what is mounted since a rollback
    snapshots/.half-…      what is being made or removed, or was by a killed command
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath

from btrfs_ublk.base.log import log
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
    is_subvolume,
    quota_limit_if_any,
    set_default_subvolume,
    set_read_only,
    subvolume_id,
)
from btrfs_ublk.kernel.mount import is_frozen
from btrfs_ublk.volume.mounts import mounts_of
from btrfs_ublk.volume.report import (
    SNAPSHOTS_DIRECTORY,
    VolumeSnapshot,
    can_have_snapshots,
    list_snapshots,
    look_at_snapshot,
    mount_of,
    opened_snapshots,
    subvolumes_in,
)
from btrfs_ublk.volume.store import (
    Rollback,
    VolumeDirectory,
    locked_volume,
)
from btrfs_ublk.volume.trees import remove_half_tree

_ROOT, _HALF = ".root-", ".half-"


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
    with (
        snapshots_locked(name, base) as (_, mount),
        opened_snapshots(mount) as directory,
    ):
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
    with snapshots_locked(name, base) as (_, mount):
        return list_snapshots(mount)


def remove_snapshot(name: str, snapshot: str, *, base: StrPath | None = None) -> None:
    """Remove a snapshot of a volume that is up. Raises UsageError when there is none of
    that name, LeftoverError while it is mounted, BtrfsUblkError."""
    with (
        snapshots_locked(name, base) as (_, mount),
        opened_snapshots(mount) as directory,
    ):
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


@contextmanager
def snapshots_locked(
    name: str, base: StrPath | None
) -> Iterator[tuple[VolumeDirectory, Path]]:
    """Lock a volume that is up; yield it and its mount point. What killed commands have
    left is gone. Raises UsageError for one that can have no snapshots."""
    with locked_volume(name, base) as volume:
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


def find_snapshot(directory: Path, name: str) -> VolumeSnapshot:
    """Return one of the snapshots. Raises UsageError when there is none of that name,
    BtrfsUblkError."""
    path = directory / name
    if name.startswith(".") or "/" in name or not is_subvolume(path):
        raise UsageError(
            f"there is no snapshot {name!r}",
            hint="see: btrfs-ublk volume snapshots NAME",
        )
    return look_at_snapshot(path)


def half_path(directory: Path) -> Path:
    """Return a path for what is half-made or half-removed."""
    return directory / (_HALF + os.urandom(8).hex())


@contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """Yield where to make a subvolume, which gets its path at the end, and is on disk
    then. Nothing is left of it after an error."""
    half = half_path(path.parent)
    with ExitStack() as on_failure:
        on_failure.push(undoing(lambda: _delete_if_there(half)))
        yield half
        half.rename(path)
        on_failure.pop_all()
    commit_transaction(path.parent)


def _delete_if_there(path: Path) -> None:
    if os.path.lexists(path):
        delete_subvolumes(path)


def remove_half_snapshots(mount: Path) -> None:
    """Remove what killed commands have left in a mounted volume, whose lock the caller
    has. What cannot be removed causes a warning: nobody waits for it."""
    try:
        if can_have_snapshots(mount):
            with opened_snapshots(mount) as directory:
                for path in directory.glob(f"{_HALF}*"):
                    delete_subvolumes(path)
    except (BtrfsUblkError, OSError) as error:
        log.warning("a snapshot that a killed command has left stays: %s", error)


def plan_rollback(mount: Path, snapshot: str) -> Rollback:
    """Return the steps for complete_rollback(). Raises UsageError when it cannot."""
    before = subvolume_id(mount)
    with opened_snapshots(mount) as directory:
        find_snapshot(directory, snapshot)
        if _place_of(directory, before) is None:
            raise UsageError(
                f"subvolume {before}, which is mounted, is none of the volume's own",
                hint="undo what btrfs subvolume set-default has done",
            )
        number = 1
        while os.path.lexists(directory / f"before-rollback-{number}"):
            number += 1
    return Rollback(
        snapshot=snapshot,
        kept=f"before-rollback-{number}",
        before=before,
        root=_ROOT + os.urandom(8).hex(),
    )


def _place_of(directory: Path, root: int) -> Path | None:
    """Return where a subvolume that is, or was, mounted is; None if it is not ours."""
    places = subvolumes_in(directory.parent) + subvolumes_in(directory)
    return next((path for path in places if subvolume_id(path) == root), None)


def complete_rollback(volume: VolumeDirectory, mount: Path, rollback: Rollback) -> None:
    """Make a rollback of a volume that is mounted where only this command gets to. The
    next mount shows what the snapshot has, and what was mounted before is a snapshot.

    Each step can be repeated, so that what a killed command has begun goes on. Raises
    BtrfsUblkError, OSError. If the volume is to stay as it is, the rollback is
    forgotten then; else the next call goes on.
    """
    with opened_snapshots(mount) as directory:
        root = directory / rollback.root
        if subvolume_id(mount) == rollback.before:
            with ExitStack() as on_failure:
                on_failure.push(undoing(volume.forget_rollback))
                on_failure.push(undoing(lambda: _delete_if_there(root)))
                if not os.path.lexists(root):
                    limit = quota_limit_if_any(mount, rollback.before)
                    source = directory / rollback.snapshot
                    with made_whole(root) as half:
                        create_deep_snapshot(
                            source, directory, half.name, quota_bytes=limit
                        )
                set_default_subvolume(root)
                on_failure.pop_all()
            commit_transaction(directory)
        before, kept = _place_of(directory, rollback.before), directory / rollback.kept
        if before is not None:
            before.rename(kept)
            set_read_only(kept)
            commit_transaction(directory)
    volume.forget_rollback()
