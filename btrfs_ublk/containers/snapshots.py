"""Snapshots for containers: each is a subvolume of one btrfs.

    ROOT/snapshots.db       which there are
    ROOT/snapshots/ID       an active or a committed snapshot, or an empty view
    ROOT/images/            sealed images, and what is made upon them: see `images`

A committed snapshot is the active one, made read-only: what was written stays charged
to the same subvolume. A view of a committed snapshot is that one itself, mounted
read-only, and so has no directory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from btrfs_ublk import __version__
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.containers.images import (
    IMAGE_REF,
    SNAPSHOTS_DIRECTORY,
    Images,
    LazyOptions,
    cached_bytes,
    layer_path,
)
from btrfs_ublk.containers.overlay import (
    check_merge,
    make_overlay,
    merge_overlay,
    mount_options,
)
from btrfs_ublk.containers.status import Status
from btrfs_ublk.containers.store import (
    SNAPSHOT_REF,
    Kind,
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

#: What containers are: snapshots, or overlays upon what is committed.
Mode = Literal["snapshot", "overlay"]
DEFAULT_MODE: Mode = "snapshot"
#: Label of a container: its mode.
MODE = "containerd.io/snapshot/btrfs-ublk.mode"
#: Labels of a container with a user namespace, by the options that have containerd 2
#: mount with these IDs: Prepare() gets them where we have the capability remap-ids.
_ID_MAPS = {
    "uidmap": "containerd.io/snapshot/uidmapping",
    "gidmap": "containerd.io/snapshot/gidmapping",
}

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

    def __init__(
        self,
        root: StrPath,
        options: LazyOptions | None = None,
        *,
        mode: Mode = DEFAULT_MODE,
    ) -> None:
        self.root = Path(root)
        self._mode = mode
        self._directory = self.root / "snapshots"
        self._committing = threading.Lock()
        check_root(self.root)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot make {self._directory}: {error.strerror}"
            ) from error
        self._has_quota = _enable_quota(self._directory)
        with ExitStack() as on_failure:
            self.store = SnapshotStore(self.root / "snapshots.db")
            on_failure.callback(self.store.close)
            self._images = Images(
                self.root, self.store, options or LazyOptions(), self._settle_image
            )
            on_failure.callback(self._images.close)
            self._settle(None, self._directory)
            on_failure.pop_all()

    def start(self) -> None:
        """Bring sealed images up in the background. A call does not wait for that, but
        for those that it needs."""
        self._images.start()

    def close(self) -> None:
        self._images.close()
        self.store.close()

    def _path(self, one: Snapshot) -> Path:
        """Return a snapshot's directory; its image comes up if it is not."""
        if one.image is None:
            return self._directory / str(one.id)
        mount = self._images.mount_of(one.image)
        if one.layer is not None:
            return layer_path(mount, one.layer)
        return mount / SNAPSHOTS_DIRECTORY / str(one.id)

    def _settle_image(self, image: str, mount: Path) -> None:
        directory = mount / SNAPSHOTS_DIRECTORY
        _enable_quota(directory)
        self._settle(image, directory)

    def _settle(self, image: str | None, directory: Path) -> None:
        """Bring the directories and rows of one file system into line: what a killed
        process or a loss of power has left half-made goes."""
        there = _numbers_in(directory)
        rows = [one for one in self.store.find() if one.image == image]
        with_directory = {one.id for one in rows if _has_directory(one)}
        for one in self.store.forget_lost(with_directory - there):
            log.warning("snapshot %r is lost: its directory is gone", one.name)
        self._delete_unknown(image, directory, there)
        for one in self.store.find(["kind==active"]):
            if one.image == image:
                try:
                    # A commit that was interrupted left it read-only.
                    set_read_only(directory / str(one.id), False)
                    if one.overlay == "merging":
                        merge_overlay(directory / str(one.id))
                        self.store.set_overlay(one.id, "")
                except BtrfsUblkError as error:
                    # All others are served nonetheless.
                    log.warning("snapshot %r: %s", one.name, error)

    def _delete_unknown(
        self, image: str | None, directory: Path, there: set[int]
    ) -> None:
        known = {one.id for one in self.store.find() if one.image == image}
        for number in there - known:
            log.info("removing %s, which no snapshot has", directory / str(number))
            self._delete(directory / str(number))

    def cleanup(self) -> None:
        """Delete the directories of removed snapshots that could not be deleted, and
        the images that none needs any more."""
        directories = [(None, self._directory)] + [
            (image, mount / SNAPSHOTS_DIRECTORY)
            for image, mount in self._images.opened()
        ]
        for image, directory in directories:
            # NB: names are listed first, as a directory is made after its row.
            with suppress(FileNotFoundError):  # the image goes meanwhile
                self._delete_unknown(image, directory, _numbers_in(directory))
        self._images.cleanup()

    def _delete(self, path: Path) -> None:
        try:
            delete_subvolumes(path)
        except BtrfsUblkError as error:
            # It has gone if another request has deleted it meanwhile. While somebody
            # still uses it, it stays, and cleanup() tries again.
            if not isinstance(error.__cause__, FileNotFoundError):
                log.warning("%s", error)

    def prepare(
        self, key: str, parent: str, labels: Mapping[str, str]
    ) -> list[SnapshotMount]:
        """Make a writable snapshot of a committed one, or an empty one. Where labels
        name a layer that can arrive when it is read, that is made a committed snapshot,
        and ALREADY_EXISTS is the refusal: containerd then fetches no layer."""
        if self._images.add_layer(key, parent, labels):
            raise RefusedError(
                "ALREADY_EXISTS", f"the layer of {key!r} arrives when it is read"
            )
        return self._make(key, parent, Kind.ACTIVE, labels)

    def view(
        self, key: str, parent: str, labels: Mapping[str, str]
    ) -> list[SnapshotMount]:
        """Make a read-only snapshot of a committed one, or an empty one."""
        return self._make(key, parent, Kind.VIEW, labels)

    def _make(
        self, key: str, parent: str, kind: Kind, labels: Mapping[str, str]
    ) -> list[SnapshotMount]:
        mode = labels.get(MODE, self._mode)
        if mode not in get_args(Mode):
            raise RefusedError(
                "INVALID_ARGUMENT",
                f"label {MODE} is {mode!r}; there are: {', '.join(get_args(Mode))}",
            )
        # NB: an image that comes up loses rows without a directory, so it has to be up
        # before this one's is written.
        above = self._path(self.store.get(parent)) if parent else None
        # Layers that are unpacked are committed at once: an overlay would be no use.
        # With mapped IDs, what a container writes has the host's in an overlay, and the
        # container's own in a snapshot, which a commit wants.
        is_overlay = (
            kind is Kind.ACTIVE
            and mode == "overlay"
            and labels.keys().isdisjoint({SNAPSHOT_REF, *_ID_MAPS.values()})
        )
        made = self.store.add(key, parent, kind, labels, overlay=is_overlay)
        if _has_directory(made):
            try:
                self._make_directory(made, above)
            except BaseException:
                self.store.remove(key)
                if made.overlay and os.path.lexists(path := self._path(made)):
                    self._delete(path)
                raise
        return self._mounts_of(made)

    def _make_directory(self, made: Snapshot, above: Path | None) -> None:
        path = self._path(made)
        if above is not None:
            create_snapshot(above, path.parent, path.name)
            if made.overlay:
                make_overlay(path, above)
                commit_transaction(path)
            return
        # The kernel gives it the caller's umask.
        create_subvolume(path.parent, path.name)
        os.chmod(path, _TOP_MODE)
        if made.kind is Kind.VIEW:
            set_read_only(path)
        # A new subvolume is on disk already, but not its mode.
        commit_transaction(path)

    def mounts(self, key: str) -> list[SnapshotMount]:
        """Return what shows an active snapshot, or a view."""
        found = self.store.get(key)
        if found.kind is Kind.COMMITTED:
            raise RefusedError(
                "FAILED_PRECONDITION",
                f"snapshot {key!r} is committed: views and active ones are mounted",
            )
        return self._mounts_of(found)

    def _mounts_of(self, found: Snapshot) -> list[SnapshotMount]:
        shown = found if _has_directory(found) else self.store.get(found.parent)
        if found.overlay == "mounted":
            overlay = mount_options(self._path(found))
            return [SnapshotMount("overlay", "overlay", overlay)]
        if found.overlay:
            raise RefusedError(
                "FAILED_PRECONDITION",
                f"snapshot {found.name!r} is being committed: commit it again, or "
                "remove it",
            )
        options = ["rbind", "ro" if found.kind is Kind.VIEW else "rw"]
        if found.labels.keys() >= set(_ID_MAPS.values()):
            options += [f"{key}={found.labels[of]}" for key, of in _ID_MAPS.items()]
        return [SnapshotMount("bind", str(self._path(shown)), options)]

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
        found = self.store.check_commit(name, key)
        if parent not in ("", found.parent):
            raise RefusedError(
                "INVALID_ARGUMENT",
                f"snapshot {key!r} was made from {found.parent!r}, and cannot be "
                f"committed upon {parent!r}",
            )
        path = self._path(found)
        if found.overlay:
            self._merge(found, path)
        set_read_only(path)
        try:
            commit_transaction(path)
            self.store.commit(name, key, labels, self._charged(path))
        except BaseException:
            set_read_only(path, False)
            raise

    def _merge(self, found: Snapshot, path: Path) -> None:
        """Make an ordinary active snapshot of an overlay. From its first step on, it is
        no overlay any more: what a killed process has left is merged at the start."""
        check_merge(path)
        self.store.set_overlay(found.id, "merging")
        merge_overlay(path)
        commit_transaction(path)
        self.store.set_overlay(found.id, "")

    def _charged(self, path: Path) -> int:
        """Return how many bytes a snapshot holds by itself; 0 where the kernel has no
        simple quotas."""
        if not self._has_quota:
            return 0
        return charged_bytes(path, subvolume_id(path))

    def usage(self, key: str) -> int:
        """Return how many bytes a snapshot holds besides its parent's. Of the lazy
        layers of an image, one is charged for what its cache holds."""
        found = self.store.get(key)
        if found.image is not None and self.store.is_last_layer(found):
            return cached_bytes(found.image)
        return self._size_bytes(found)

    def _size_bytes(self, found: Snapshot) -> int:
        if found.size_bytes is not None:
            return found.size_bytes
        return self._charged(self._path(found)) if _has_directory(found) else 0

    def status(self) -> Status:
        """Return how many snapshots there are, and what they are charged for."""
        found = self.store.find()
        used_bytes = 0
        up = {image for image, _ in self._images.opened()}
        for one in found:
            if one.image is not None and one.image not in up:
                used_bytes += one.size_bytes or 0
                continue
            with suppress(BtrfsUblkError):  # it has been removed meanwhile
                used_bytes += self._size_bytes(one)
        layers: dict[str, dict[str, int]] = {}
        for one in found:
            if one.kind is Kind.COMMITTED:
                name = one.labels.get(IMAGE_REF, "")
                counts = layers.setdefault(name, {"lazy": 0, "ordinary": 0})
                counts["ordinary" if one.layer is None else "lazy"] += 1
        return Status(
            root=str(self.root.absolute()),
            version=__version__,
            snapshots={
                kind.value: sum(one.kind is kind for one in found) for kind in Kind
            },
            used_bytes=used_bytes if self._has_quota else None,
            layers=layers,
            fallbacks=dict(self._images.fallbacks),
            images=self._images.status(),
        )

    def remove(self, key: str) -> None:
        """Remove a snapshot that is no parent."""
        found = self.store.remove(key)
        if _has_directory(found):
            try:
                path = self._path(found)
            except BtrfsUblkError as error:
                # Its directory goes when its image comes up, or with it.
                log.warning("snapshot %r: %s", key, error)
            else:
                self._delete(path)


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


def _enable_quota(directory: Path) -> bool:
    try:
        enable_simple_quota(directory)
    except BtrfsUblkError as error:
        log.warning("%s; so the sizes of snapshots are not known", error)
        return False
    return True


def _numbers_in(directory: Path) -> set[int]:
    return {int(name) for name in os.listdir(directory) if name.isdecimal()}


def _has_directory(snapshot: Snapshot) -> bool:
    """Whether a directory is its own: views show their parents', and lazy layers what
    their image has."""
    if snapshot.layer is not None:
        return False
    return snapshot.kind is not Kind.VIEW or snapshot.parent_id is None
