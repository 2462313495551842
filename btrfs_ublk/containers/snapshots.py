"""Snapshots for containers: each is a subvolume of one btrfs.

    ROOT/snapshots.db       which there are
    ROOT/snapshots/ID       an active or a committed snapshot, or an empty view

A committed snapshot is the active one, made read-only: what was written stays charged
to the same subvolume. A view of a committed snapshot is that one itself, mounted
read-only, and so has no directory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk import __version__
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.containers.status import Status
from btrfs_ublk.containers.store import (
    Kind,
    Refusal,
    RefusedError,
    Snapshot,
    SnapshotStore,
)
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import (
    charged_bytes,
    commit_transaction,
    create_snapshot,
    create_subvolume,
    delete_subvolumes,
    enable_simple_quota,
    filesystem_uuid,
    set_read_only,
    subvolume_id,
)

log = logging.getLogger(__name__)

_TOP_MODE = 0o755  # of an empty snapshot's top directory


@dataclass(frozen=True)
class SnapshotMount:
    """A mount as containerd makes it."""

    type: str
    source: str
    options: Sequence[str]


class Snapshots:
    """The snapshots below ``root``, a directory of a btrfs that is writable. Methods
    may be called by several threads. Raises RefusedError and BtrfsUblkError."""

    def __init__(self, root: StrPath) -> None:
        self.root = Path(root)
        self._directory = self.root / "snapshots"
        self._committing = threading.Lock()
        check_root(self.root)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot make {self._directory}: {error.strerror}"
            ) from error
        self._has_quota = self._enable_quota()
        self._store = SnapshotStore(self.root / "snapshots.db")
        self.reconcile()

    def close(self) -> None:
        self._store.close()

    def _enable_quota(self) -> bool:
        try:
            enable_simple_quota(self._directory)
        except BtrfsUblkError as error:
            log.warning("%s; so the sizes of snapshots are not known", error)
            return False
        return True

    def _path(self, number: int) -> Path:
        return self._directory / str(number)

    def reconcile(self) -> None:
        """Bring directories and rows into line: what a killed process or a loss of
        power has left half-made goes."""
        there = {int(name) for name in os.listdir(self._directory) if name.isdecimal()}
        rows = self._store.find()
        bare = {one.id for one in rows if not _has_directory(one)}
        for one in self._store.forget_lost(there | bare):
            log.warning("snapshot %r is lost: its directory is gone", one.name)
        self._delete_unknown(there)
        for one in self._store.find(["kind==active"]):
            # A commit that was interrupted left it read-only.
            set_read_only(self._path(one.id), False)

    def _delete_unknown(self, there: set[int]) -> None:
        for number in there - {one.id for one in self._store.find()}:
            log.info("removing %s, which no snapshot has", self._path(number))
            self._delete(number)

    def cleanup(self) -> None:
        """Delete the directories of removed snapshots that could not be deleted."""
        # NB: names are listed first, as a directory is made after its row.
        there = {int(name) for name in os.listdir(self._directory) if name.isdecimal()}
        self._delete_unknown(there)

    def _delete(self, number: int) -> None:
        try:
            delete_subvolumes(self._path(number))
        except BtrfsUblkError as error:
            # Somebody still uses it; cleanup() tries again.
            log.warning("%s", error)

    def prepare(
        self, key: str, parent: str, labels: Mapping[str, str]
    ) -> list[SnapshotMount]:
        """Make a writable snapshot of a committed one, or an empty one."""
        return self._make(key, parent, Kind.ACTIVE, labels)

    def view(
        self, key: str, parent: str, labels: Mapping[str, str]
    ) -> list[SnapshotMount]:
        """Make a read-only snapshot of a committed one, or an empty one."""
        return self._make(key, parent, Kind.VIEW, labels)

    def _make(
        self, key: str, parent: str, kind: Kind, labels: Mapping[str, str]
    ) -> list[SnapshotMount]:
        made = self._store.add(key, parent, kind, labels)
        if _has_directory(made):
            try:
                self._make_directory(made)
            except BaseException:
                self._store.remove(key)
                raise
        return self._mounts_of(made)

    def _make_directory(self, made: Snapshot) -> None:
        name = str(made.id)
        if made.parent_id is not None:
            create_snapshot(self._path(made.parent_id), self._directory, name)
            return
        # The kernel gives it the caller's umask.
        path = create_subvolume(self._directory, name)
        os.chmod(path, _TOP_MODE)
        if made.kind is Kind.VIEW:
            set_read_only(path)

    def mounts(self, key: str) -> list[SnapshotMount]:
        """Return what shows an active snapshot, or a view."""
        found = self._store.get(key)
        if found.kind is Kind.COMMITTED:
            raise RefusedError(
                Refusal.FAILED_PRECONDITION,
                f"snapshot {key!r} is committed: views and active ones are mounted",
            )
        return self._mounts_of(found)

    def _mounts_of(self, found: Snapshot) -> list[SnapshotMount]:
        shown = found.id if _has_directory(found) else found.parent_id
        assert shown is not None
        access = "ro" if found.kind is Kind.VIEW else "rw"
        return [SnapshotMount("bind", str(self._path(shown)), ("rbind", access))]

    def commit(
        self, name: str, key: str, labels: Mapping[str, str], *, parent: str = ""
    ) -> None:
        """Make the active snapshot ``key`` the committed snapshot ``name``. What it
        holds lies on the disk then. ``parent`` must be what it was made from, if it is
        given."""
        # NB: a client repeats what it has waited for too long. The second call must not
        # undo what the first has done.
        with self._committing:
            self._commit(name, key, labels, parent)

    def _commit(
        self, name: str, key: str, labels: Mapping[str, str], parent: str
    ) -> None:
        found = self._store.check_commit(name, key)
        if parent not in ("", found.parent):
            raise RefusedError(
                Refusal.INVALID_ARGUMENT,
                f"snapshot {key!r} was made from {found.parent!r}, and cannot be "
                f"committed upon {parent!r}",
            )
        path = self._path(found.id)
        set_read_only(path)
        try:
            commit_transaction(path)
            self._store.commit(name, key, labels, self._charged(found.id))
        except BaseException:
            set_read_only(path, False)
            raise

    def _charged(self, number: int) -> int:
        """Return how many bytes a snapshot holds by itself; 0 where the kernel has no
        simple quotas."""
        if not self._has_quota:
            return 0
        path = self._path(number)
        return charged_bytes(path, subvolume_id(path))

    def usage(self, key: str) -> int:
        """Return how many bytes a snapshot holds besides its parent's."""
        return self._size_bytes(self._store.get(key))

    def _size_bytes(self, found: Snapshot) -> int:
        if found.size_bytes is not None:
            return found.size_bytes
        return self._charged(found.id) if _has_directory(found) else 0

    def status(self) -> Status:
        """Return how many snapshots there are, and what they are charged for."""
        found = self._store.find()
        used_bytes = 0
        for one in found:
            with suppress(BtrfsUblkError):  # it has been removed meanwhile
                used_bytes += self._size_bytes(one)
        return Status(
            root=str(self.root.absolute()),
            version=__version__,
            snapshots={
                kind.value: sum(one.kind is kind for one in found) for kind in Kind
            },
            used_bytes=used_bytes if self._has_quota else None,
        )

    def remove(self, key: str) -> None:
        """Remove a snapshot that is no parent."""
        found = self._store.remove(key)
        if _has_directory(found):
            self._delete(found.id)

    def stat(self, key: str) -> Snapshot:
        return self._store.get(key)

    def update(
        self, key: str, labels: Mapping[str, str], paths: Sequence[str]
    ) -> Snapshot:
        """Change labels; see SnapshotStore.update()."""
        return self._store.update(key, labels, paths)

    def find(self, filters: Sequence[str] = ()) -> list[Snapshot]:
        return self._store.find(filters)


def check_root(root: Path) -> None:
    """Raise UsageError where there can be no snapshots."""
    there = root.absolute()
    while not there.is_dir():
        there = there.parent
    try:
        filesystem_uuid(there)
    except BtrfsUblkError as error:
        raise UsageError(
            f"{root} is on no btrfs, and snapshots are subvolumes of one",
            hint="mount one there, for example that of `btrfs-ublk volume up`",
        ) from error


def _has_directory(snapshot: Snapshot) -> bool:
    return snapshot.kind is not Kind.VIEW or snapshot.parent_id is None
