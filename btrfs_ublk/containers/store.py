"""Which snapshots there are: rows of an SQLite file, changed in transactions.

It holds names, parents, kinds and labels, and the rules for them, as containerd
expects them; directories are the business of `snapshots`. Names are what containerd
calls keys: unique over all kinds.
"""

from __future__ import annotations

import ctypes
import json
import os
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from btrfs_ublk.containers.filters import lookup_of, parse_filters
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.btrfs import commit_transaction
from btrfs_ublk.units import MIB

#: Label of a layer that a client wants to unpack: its chain ID.
SNAPSHOT_REF = "containerd.io/snapshot.ref"

_BUSY_TIMEOUT_S = 30.0
_RESERVE_BYTES = 4 * MIB  # hundreds of removals, each of which writes some pages
_APPLICATION_ID = 0x62756373  # "bucs"
_VERSION = 3
#: Version 2 has images, and version 3 overlays; what files of versions before get.
_IMAGES = """
CREATE TABLE images (
    digest TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    ready_s REAL
) STRICT;
ALTER TABLE snapshots ADD COLUMN image TEXT REFERENCES images (digest);
ALTER TABLE snapshots ADD COLUMN layer TEXT;
CREATE INDEX of_image ON snapshots (image);
"""
_OVERLAYS = """
ALTER TABLE snapshots ADD COLUMN overlay TEXT NOT NULL DEFAULT '';
"""
_CHANGES = {1: _IMAGES + _OVERLAYS, 2: _OVERLAYS}
_SCHEMA = """
CREATE TABLE snapshots (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    parent INTEGER REFERENCES snapshots (id),
    kind TEXT NOT NULL CHECK (kind IN ('view', 'active', 'committed')),
    created_ns INTEGER NOT NULL,
    updated_ns INTEGER NOT NULL,
    labels TEXT NOT NULL,
    bytes INTEGER
) STRICT;
CREATE INDEX children ON snapshots (parent);
""" + _CHANGES[1]
_COLUMNS = """
SELECT s.id, s.name, p.name, s.parent, s.kind, s.created_ns, s.updated_ns, s.labels,
    s.bytes, s.image, s.layer, s.overlay
FROM snapshots AS s LEFT JOIN snapshots AS p ON p.id = s.parent
"""


class Kind(Enum):
    VIEW = "view"  # read-only
    ACTIVE = "active"  # writable, becomes a committed one or is removed
    COMMITTED = "committed"  # never changes, may be a parent


#: Why a call was refused, by the names of gRPC's status codes.
Refusal = Literal[
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "UNAVAILABLE",
]


class RefusedError(BtrfsUblkError):
    """A call that the state of the snapshots does not allow."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


@dataclass(frozen=True)
class Snapshot:
    id: int  # names its directory
    name: str
    parent: str  # "" for none
    parent_id: int | None
    kind: Kind
    created_ns: int  # since 1970
    updated_ns: int
    labels: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int | None = None  # of committed ones: what it was charged for then
    image: str | None = None  # in whose file system it is; None: in that of the root
    layer: str | None = None  # of a lazy layer: its chain ID, which names its directory
    overlay: str = ""  # of an active one that is an overlay: "mounted" or "merging"


@dataclass(frozen=True)
class ImageRow:
    """A sealed image that was opened: the digest of its manifest, REGISTRY/REPOSITORY@
    DIGEST, and how long it took until it could be read."""

    digest: str
    name: str
    ready_s: float | None


class SnapshotStore:
    """The file at ``path``, which is made when it is absent. All methods raise
    RefusedError; they may be called by several threads."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._syncing = threading.Lock()  # held while the log is synced
        self._asked = self._synced = 0  # calls of _sync(), and how many it has answered
        self._reserve = path.with_name("reserve")
        self._lost = ""  # why the log may lack changes on the disk; "": it does not
        self._connection = sqlite3.connect(
            path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._open(path)
        except BaseException:
            self._connection.close()
            raise

    def _open(self, path: Path) -> None:
        run = self._run
        try:
            # One process has it. NB: else SQLite maps a file, whose pages are SIGBUS to
            # us where the disk is full.
            run("PRAGMA locking_mode = EXCLUSIVE")
            (version,) = run("PRAGMA user_version").fetchone()
            (application,) = run("PRAGMA application_id").fetchone()
            known = application == _APPLICATION_ID and version <= _VERSION
            if known or version == application == 0:  # else the file stays as it is
                run("PRAGMA journal_mode = WAL")
            run("PRAGMA foreign_keys = ON")
            if version == 0 and application == 0:
                self._connection.executescript(
                    f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID};"
                    f"PRAGMA user_version = {_VERSION}; COMMIT;"
                )
                version, application = _VERSION, _APPLICATION_ID
            elif version in _CHANGES and application == _APPLICATION_ID:
                self._connection.executescript(
                    f"BEGIN; {_CHANGES[version]}"
                    f"PRAGMA user_version = {_VERSION}; COMMIT;"
                )
                version = _VERSION
        except sqlite3.Error as error:
            raise BtrfsUblkError(
                f"cannot open {path}: {error}", hint="is its disk full, or read-only?"
            ) from error
        if application != _APPLICATION_ID or version != _VERSION:
            raise BtrfsUblkError(
                f"{path} is of version {version} of application {application:#x}, this "
                f"is version {_VERSION} of {_APPLICATION_ID:#x}",
                hint="was it made by a newer btrfs-ublk? then use that one",
            )
        # NB: the kernel tells each descriptor of a write that has failed, but not one
        # that was opened after another was told. SQLite keeps this log until it closes
        # the file.
        run("SELECT count(*) FROM snapshots").fetchone()  # it makes the log
        self._log = open(f"{path}-wal", "rb", buffering=0)
        self._keep_room()

    def _keep_room(self) -> None:
        """Keep a file whose room removals can have on a full disk, as they are what
        makes room. Without it they fail there."""
        with suppress(OSError):
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _RESERVE_BYTES)
            finally:
                os.close(fd)

    def _give_room(self) -> bool:
        """Return whether there is more room now."""
        try:
            self._reserve.unlink()
            commit_transaction(self._reserve.parent)  # it is free only then
        except (OSError, BtrfsUblkError):
            return False
        return True

    def close(self) -> None:
        """Close the file, unless its log has lost something: SQLite would copy that to
        the file, where the next one to open it reads what is whole of the log."""
        with self._lock:
            if not self._lost:
                self._connection.close()
            self._log.close()

    def _sync(self) -> None:
        """Wait until all changes so far lie on the disk. Calls at the same time share
        that, and no other one waits. Raises BtrfsUblkError, and so does each call and
        each change from then on: the kernel tells of a write that has failed only once,
        and what comes behind a gap in the log counts for nothing.

        NB: what SQLite's log does not have any more, a checkpoint has synced.
        """
        with self._lock:
            self._asked += 1
            mine = self._asked
        with self._syncing:
            if self._synced >= mine:
                return
            self._check_log()
            reached = self._asked
            try:
                os.fdatasync(self._log.fileno())
            except OSError as error:
                self._lost = str(error.strerror)
                # NB: else it would be closed when this object goes; see close().
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
                self._check_log()
            self._synced = reached

    def _check_log(self) -> None:
        if self._lost:
            raise BtrfsUblkError(
                f"cannot write {self._path}: {self._lost}; nothing is changed any more",
                hint="see whether its disk is full or read-only, then restart the "
                "snapshotter",
            )

    @contextmanager
    def _changing(self, *, durable: bool = True) -> Iterator[None]:
        """A transaction, which is durable at the end of the block; else, after the next
        _sync()."""
        with self._lock:
            self._check_log()
            try:
                how = "FULL" if durable else "NORMAL"
                self._run(f"PRAGMA synchronous = {how}")
                self._run("BEGIN IMMEDIATE")
                yield
                self._run("COMMIT")
            except BaseException as error:
                if self._connection.in_transaction:
                    self._run("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise BtrfsUblkError(
                        f"cannot write {self._path}: {error}",
                        hint="is its disk full, or read-only?",
                    ) from error
                raise

    def _run(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _row(self, where: str, value: object) -> Snapshot | None:
        found = self._run(f"{_COLUMNS} WHERE {where} = ?", (value,)).fetchone()
        return None if found is None else _snapshot(found)

    def _get(self, name: str) -> Snapshot:
        found = self._row("s.name", name)
        if found is None:
            raise RefusedError("NOT_FOUND", f"snapshot {name!r} does not exist")
        return found

    def _get_parent(self, name: str) -> Snapshot | None:
        """Return a committed snapshot; None for no name."""
        if not name:
            return None
        above = self._get(name)
        if above.kind is not Kind.COMMITTED:
            raise RefusedError(
                "INVALID_ARGUMENT",
                f"parent {name!r} is {above.kind.value}, not committed",
            )
        return above

    def get(self, name: str) -> Snapshot:
        with self._lock:
            return self._get(name)

    def find(self, filters: Sequence[str] = ()) -> list[Snapshot]:
        """Return the snapshots that match one of the filters, oldest first. Raises
        UsageError for a filter that cannot be parsed."""
        matches = parse_filters(filters)
        with self._lock:
            rows = self._run(f"{_COLUMNS} ORDER BY s.id").fetchall()
        found = map(_snapshot, rows)
        return [one for one in found if matches(lookup_of(_fields(one), one.labels))]

    def add(
        self,
        name: str,
        parent: str,
        kind: Kind,
        labels: Mapping[str, str],
        *,
        overlay: bool = False,
    ) -> Snapshot:
        """Add a view or an active snapshot. Its parent has to be committed."""
        if not name:
            raise RefusedError(
                "INVALID_ARGUMENT", "a snapshot needs a key that is not empty"
            )
        if not self._reserve.exists():
            self._keep_room()
        with self._changing(durable=False):
            above = self._get_parent(parent)
            image = above.image if above else None
            how = "mounted" if overlay and above else ""
            made = self._insert(name, above, kind, labels, image=image, overlay=how)
        self._sync()
        return made

    def _insert(
        self,
        name: str,
        above: Snapshot | None,
        kind: Kind,
        labels: Mapping[str, str],
        *,
        image: str | None,
        layer: str | None = None,
        overlay: str = "",
    ) -> Snapshot:
        self._check_free(name)
        now, number = time.time_ns(), above.id if above else None
        size_bytes = None if layer is None else 0
        self._run(
            "INSERT INTO snapshots (name, parent, kind, created_ns, updated_ns, labels,"
            " bytes, image, layer, overlay) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (name, number, kind.value, now, now, _encode(labels), size_bytes)
            + (image, layer, overlay),
        )
        return self._get(name)

    def set_overlay(self, number: int, overlay: str) -> None:
        """Record what has become of an active snapshot that was an overlay."""
        with self._changing():
            self._run(
                "UPDATE snapshots SET overlay = ? WHERE id = ?", (overlay, number)
            )

    def find_layer(self, target: str, parent: str) -> Snapshot | None:
        """Return the committed snapshot that containerd would take for a layer: with
        this name as a label, and this parent. Raises RefusedError for a parent that
        there is not, or that is not committed."""
        with self._lock:
            above = self._get_parent(parent)
            return self._find_layer(target, above)

    def _find_layer(self, target: str, above: Snapshot | None) -> Snapshot | None:
        parent, label = above.id if above else None, f'$."{SNAPSHOT_REF}"'
        row = self._run(
            f"{_COLUMNS} WHERE s.parent IS ? AND s.kind = ?"
            " AND json_extract(s.labels, ?) = ?",
            (parent, Kind.COMMITTED.value, label, target),
        ).fetchone()
        return None if row is None else _snapshot(row)

    def add_layer(
        self,
        name: str,
        parent: str,
        labels: Mapping[str, str],
        *,
        image: str,
        layer: str,
    ) -> Snapshot:
        """Add a lazy layer of an image that was added, as a committed snapshot, unless
        containerd can take another one. ``layer`` is its chain ID."""
        target = labels[SNAPSHOT_REF]
        with self._changing():
            above = self._get_parent(parent)
            found = self._find_layer(target, above)
            return found or self._insert(
                name, above, Kind.COMMITTED, labels, image=image, layer=layer
            )

    def is_last_layer(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is the lazy layer of its image that was added last."""
        with self._lock:
            (last,) = self._run(
                "SELECT max(id) FROM snapshots WHERE image = ? AND layer IS NOT NULL",
                (snapshot.image,),
            ).fetchone()
        return snapshot.layer is not None and bool(snapshot.id == last)

    def add_image(self, digest: str, name: str) -> None:
        """Add an image, unless it is there."""
        with self._changing():
            self._run(
                "INSERT INTO images (digest, name) VALUES (?, ?)"
                " ON CONFLICT (digest) DO NOTHING",
                (digest, name),
            )

    def set_ready(self, digest: str, ready_s: float) -> None:
        """Record how long an image took until it could be read."""
        with self._changing():
            self._run(
                "UPDATE images SET ready_s = ? WHERE digest = ?", (ready_s, digest)
            )

    def forget_image(self, digest: str) -> None:
        """Remove an image that no snapshot is in."""
        with self._changing():
            self._run("DELETE FROM images WHERE digest = ?", (digest,))

    def images(self, *, unused: bool = False) -> list[ImageRow]:
        """Return all images, or those that no snapshot is in."""
        where = (
            "WHERE digest NOT IN (SELECT image FROM snapshots WHERE image IS NOT NULL)"
            if unused
            else ""
        )
        with self._lock:
            rows = self._run(
                f"SELECT digest, name, ready_s FROM images {where} ORDER BY digest"
            ).fetchall()
        return [ImageRow(*row) for row in rows]

    def _check_free(self, name: str) -> None:
        if self._row("s.name", name) is not None:
            raise RefusedError("ALREADY_EXISTS", f"snapshot {name!r} already exists")

    def check_commit(self, name: str, key: str) -> Snapshot:
        """Return the active snapshot ``key``, if it may be committed as ``name``."""
        with self._lock:
            return self._check_commit(name, key)

    def _check_commit(self, name: str, key: str) -> Snapshot:
        if not name:
            raise RefusedError("INVALID_ARGUMENT", "a committed snapshot needs a name")
        self._check_free(name)
        found = self._get(key)
        if found.kind is not Kind.ACTIVE:
            raise RefusedError(
                "FAILED_PRECONDITION",
                f"snapshot {key!r} is {found.kind.value}: only an active one can be "
                "committed",
            )
        return found

    def commit(
        self, name: str, key: str, labels: Mapping[str, str], size_bytes: int
    ) -> None:
        """Make the active snapshot ``key`` the committed snapshot ``name``."""
        with self._changing():
            found = self._check_commit(name, key)
            now, kind = time.time_ns(), Kind.COMMITTED.value
            self._run(
                "UPDATE snapshots SET name = ?, kind = ?, created_ns = ?,"
                " updated_ns = ?, labels = ?, bytes = ? WHERE id = ?",
                (name, kind, now, now, _encode(labels), size_bytes, found.id),
            )

    def update(
        self, name: str, labels: Mapping[str, str], paths: Sequence[str]
    ) -> Snapshot:
        """Replace the labels that ``paths`` names ("labels.NAME"), or all of them
        ("labels", or no paths)."""
        with self._changing():
            found = self._get(name)
            changed = dict(found.labels)
            for path in paths or ["labels"]:
                if path == "labels":
                    changed = dict(labels)
                elif path.startswith("labels."):
                    label = path.removeprefix("labels.")
                    if labels.get(label):
                        changed[label] = labels[label]
                    else:
                        changed.pop(label, None)
                else:
                    raise RefusedError(
                        "INVALID_ARGUMENT",
                        f"field {path!r} of snapshot {name!r} never changes: only "
                        "labels do",
                    )
            now = time.time_ns()
            self._run(
                "UPDATE snapshots SET labels = ?, updated_ns = ? WHERE id = ?",
                (_encode(changed), now, found.id),
            )
            return replace(found, labels=changed, updated_ns=now)

    def remove(self, name: str) -> Snapshot:
        """Remove a snapshot that is no parent; return what it was."""
        try:
            found = self._remove(name)
        except BtrfsUblkError as error:
            if isinstance(error, RefusedError) or not self._give_room():
                raise
            found = self._remove(name)
        self._sync()
        return found

    def _remove(self, name: str) -> Snapshot:
        with self._changing(durable=False):
            found = self._get(name)
            child = self._row("s.parent", found.id)
            if child is not None:
                raise RefusedError(
                    "FAILED_PRECONDITION",
                    f"cannot remove snapshot {name!r}: it is the parent of "
                    f"{child.name!r}",
                )
            self._run("DELETE FROM snapshots WHERE id = ?", (found.id,))
        return found

    def forget_lost(self, lost: Collection[int]) -> list[Snapshot]:
        """Remove the snapshots whose directories are lost, and all that are upon them;
        return them."""
        with self._changing():
            rows = self._run(f"{_COLUMNS} ORDER BY s.id").fetchall()
            gone: dict[int, Snapshot] = {}
            for one in map(_snapshot, rows):
                # A parent is older than its children, so it has the smaller id.
                if one.id in lost or one.parent_id in gone:
                    gone[one.id] = one
            for number in reversed(gone):
                self._run("DELETE FROM snapshots WHERE id = ?", (number,))
            return list(gone.values())


def _snapshot(row: tuple[Any, ...]) -> Snapshot:
    """``row`` has the fields of Snapshot in their order."""
    found = Snapshot(*row)
    return replace(
        found,
        parent=found.parent or "",
        kind=Kind(found.kind),
        labels=json.loads(str(found.labels)),
    )


def _encode(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(labels), sort_keys=True)


def _fields(snapshot: Snapshot) -> dict[str, str]:
    return {
        "name": snapshot.name,
        "parent": snapshot.parent,
        "kind": snapshot.kind.value,
    }
