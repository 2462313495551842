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
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.log import log
from btrfs_ublk.base.undo import undoing
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import (
    TOP_LEVEL,
    commit_transaction,
    create_deep_snapshot,
    delete_subvolumes,
    is_subvolume,
    opened_subvolume,
    quota_limit_if_any,
    set_default_subvolume,
    set_read_only,
    subvolume_id,
    subvolume_time_s,
)
from btrfs_ublk.volume.store import Rollback, VolumeDirectory

SNAPSHOTS_DIRECTORY = "snapshots"
_ROOT, _HALF = ".root-", ".half-"


@dataclass(frozen=True, kw_only=True)
class VolumeSnapshot:
    """A snapshot of a volume. ``time_s`` is when it was made, in seconds since 1970; of
    one that a rollback has kept, when it was last changed. ``subvolume`` is its number.
    """

    name: str
    time_s: int
    subvolume: int


def can_have_snapshots(mount: Path) -> bool:
    """Whether a subvolume is mounted there: of images and of volumes of early versions,
    it is the top level. Raises BtrfsUblkError."""
    return subvolume_id(mount) != TOP_LEVEL


@contextmanager
def opened_snapshots(mount: Path) -> Iterator[Path]:
    """Yield a path to the directory of snapshots, valid in the block. It may not be
    there yet. Raises BtrfsUblkError."""
    with opened_subvolume(mount, TOP_LEVEL) as top:
        yield top / SNAPSHOTS_DIRECTORY


def list_snapshots(mount: Path) -> list[VolumeSnapshot]:
    """Return the snapshots of a mounted volume, the oldest first; none of one that can
    have none. Raises BtrfsUblkError."""
    if not can_have_snapshots(mount):
        return []
    with opened_snapshots(mount) as directory:
        found = [_look(x) for x in _subvolumes(directory) if not x.name.startswith(".")]
    return sorted(found, key=lambda one: (one.time_s, one.name))


def find_snapshot(directory: Path, name: str) -> VolumeSnapshot:
    """Return one of the snapshots. Raises UsageError when there is none of that name,
    BtrfsUblkError."""
    path = directory / name
    if name.startswith(".") or "/" in name or not is_subvolume(path):
        raise UsageError(
            f"there is no snapshot {name!r}",
            hint="see those that there are: btrfs-ublk volume snapshots",
        )
    return _look(path)


def _look(path: Path) -> VolumeSnapshot:
    return VolumeSnapshot(
        name=path.name, time_s=subvolume_time_s(path), subvolume=subvolume_id(path)
    )


def _subvolumes(directory: Path) -> list[Path]:
    return [x for x in directory.glob("*") if is_subvolume(x)]


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
    places = _subvolumes(directory.parent) + _subvolumes(directory)
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
