"""A volume's data on disk: one directory for each volume (docs/volumes.md).

They survive a reboot, so what is written here is synced. Root trusts their content:
directories have mode 0700 and are ours. Files are replaced by rename(2).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from dataclasses import dataclass as compiled_dataclass
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from btrfs_ublk import seed as seeds
from btrfs_ublk.base.jsonfile import RecordFormat, remove_unfinished, sync
from btrfs_ublk.base.ledger import boot_id
from btrfs_ublk.base.log import step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.private_dirs import (
    CONFIG_DIRECTORY,
    CONFIG_VARIABLE,
    VOLUMES_DIRECTORY,
    VOLUMES_VARIABLE,
    check_private,
    make_private,
)
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.content import SourceKeys
from btrfs_ublk.device.locks import Lock, is_locked, lock_file, registry_locked
from btrfs_ublk.device.state import (
    RUN_DIRECTORY,
    RUN_VARIABLE,
    check_name,
    half_made,
    half_path,
)
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.kernel.temporary import loops_below, remove_tree
from btrfs_ublk.volume.definition import VolumeDefinition, read_definition
from btrfs_ublk.volume.entry import origin_of

if TYPE_CHECKING:
    from btrfs_ublk.server.description import Description

FORMAT_VERSION = 1
#: Another command may hold the lock: it fetches nothing, but may wait for a server. On
#: a busy machine, a snapshot takes a second, and dozens may want one at once.
_LOCK_TIMEOUT_S = 600.0

_Record = TypeVar("_Record")
_HINT = f"run as root, or name a directory of yours in {VOLUMES_VARIABLE}"


class DamagedVolumeError(BtrfsUblkError):
    """A volume's files are not valid; they were left unchanged."""


_FILES = RecordFormat(
    FORMAT_VERSION,
    DamagedVolumeError,
    lambda _path: "correct it, or bring it back from a backup",
    synced=True,
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was made once (volume.json). ``seed`` is the report on the Seed, with
    another path. ``fsid`` is the sprout's, None before it is made. ``image`` is what
    the volume was made of, if that was a sealed image.
    """

    tag: str
    size_bytes: int
    writable_bytes: int
    seed: dict[str, Any]
    fsid: str | None = None
    image: dict[str, Any] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the metadata of its image lack: a command that makes the volume goes
        on, or was killed."""
        return self.image is not None and bool(self.image.get("pending"))


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where a volume is up, or would be had the command not died (session.json).
    ``made_target`` says that the command made the mount point. ``directory`` tells the
    volume's directory from copies of it, by the numbers of its file system and inode;
    it is "" from earlier versions.
    """

    boot_id: str
    target: str
    made_target: bool
    directory: str = ""

    @property
    def is_of_this_boot(self) -> bool:
        return self.boot_id == boot_id()


@compiled_dataclass(frozen=True, kw_only=True)
class MadeFile:
    """A file that was cloned into the volume (files.json): ``size_bytes`` of the
    virtual data from ``offset`` on. While ``is_whole`` is false, it may be missing.
    """

    path: str
    source: SourceKeys
    offset: int
    size_bytes: int
    is_whole: bool


@dataclass(frozen=True, kw_only=True)
class MadeTree:
    """A tree of the definition that was added (trees.json), as a subvolume of that
    number, and ``directories`` above it that were made for it. The user may have moved
    or deleted it since."""

    path: str
    source: SourceKeys
    subvolume: int
    directories: list[str]
    files: int
    size_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For people and JSON, which do not get all of a signed URL."""
        keys = {"path": self.path, "origin": origin_of(self.source)}
        return keys | {"files": self.files, "size_bytes": self.size_bytes}


@dataclass(frozen=True, kw_only=True)
class HalfTree:
    """A tree that is being added to the volume (adding.json): the path of the subvolume
    that it is made in, directories above that were missing, the name of its data object
    in ``trees``, if that is new, and the number of the subvolume once that is there.
    """

    path: str
    directories: list[str]
    data: str | None
    subvolume: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """A rollback of a volume that is down, which `up` completes (rollback.json): to
    which snapshot, the name that the state before it gets, the number of the subvolume
    that has that state, and the name of the one to mount instead.
    """

    snapshot: str
    kept: str
    before: int
    root: str


def _read(kind: type[_Record], path: Path) -> _Record | None:
    keys = _FILES.read(path)
    return None if keys is None else _FILES.parse(kind, keys, path)


def _read_list(kind: type[_Record], path: Path, name: str) -> list[_Record]:
    keys = _FILES.read(path) or {name: []}
    try:
        return [_FILES.parse(kind, one, path) for one in keys[name]]
    except (KeyError, TypeError) as error:
        raise _FILES.damaged(path, repr(error)) from error


class VolumeDirectory:
    """The files of one volume, at ``path``. The constructor touches none of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.lock = path / "lock"
        self.seed_image = path / "seed.img"
        self.sprout_image = path / "sprout.img"
        self.map = path / "map"
        #: The default; the definition may name another directory.
        self.cache = path / "cache"
        #: Where it is mounted for a rollback, out of sight of others.
        self.sprouting = path / "sprouting"
        #: Ledgers of resources that outlive the command that made them.
        self.ledgers = path / "ledgers"
        self._definition = path / "definition.toml"
        self._made = path / "volume.json"
        self._session = path / "session.json"
        self._files = path / "files.json"
        self._adding = path / "adding.json"
        self._rollback = path / "rollback.json"
        self._trees = path / "trees.json"
        #: Data objects of trees that were added, by the roots of their digests.
        self.trees = path / "trees"

    def is_volume(self) -> bool:
        """Whether it has files that only volumes have, even if damaged.

        NB: images of that name may lie in anybody's directory.
        """
        records = (self._made, self._definition)
        return any(map(os.path.isfile, records)) or (
            os.path.isfile(self.seed_image) and os.path.isdir(self.ledgers)
        )

    def check(self) -> None:
        """Raise UsageError when there is no such volume, BtrfsUblkError when the
        directory is not this user's alone.
        """
        if not os.path.lexists(self.path):
            raise UsageError(
                f"there is no volume {self.name!r} in {self.path.parent}",
                hint="see: btrfs-ublk volume list",
            )
        check_private(self.path, what="volume directory", hint=_HINT)
        if not self.is_volume():
            raise UsageError(
                f"{self.path} is no volume: it has no {self._made.name}",
                hint=f"see: btrfs-ublk volume list --base {self.path.parent}",
            )

    def definition(self, *, files: bool = True) -> VolumeDefinition:
        return read_definition(self._definition, files=files)

    def made(self) -> Made:
        if (made := _read(Made, self._made)) is None:
            raise _FILES.damaged(self._made, "it is missing")
        return made

    def is_pending(self) -> bool:
        """Whether the metadata of its image have not come: a command makes it, or was
        killed."""
        if not os.path.isfile(self._made):
            return False
        self.check()
        return self.made().is_pending

    def seed(self) -> seeds.Seed:
        """Return the seed with its current path."""
        seed = seeds.parse_report(json.dumps(self.made().seed))
        return replace(seed, path=self.seed_image)

    def fsid(self) -> UUID | None:
        """Return the sprout's fsid; None before it is made."""
        text = self.made().fsid
        try:
            return None if text is None else UUID(text)
        except ValueError as error:
            raise _FILES.damaged(self._made, f"fsid {text!r} is no UUID") from error

    def session(self) -> Session | None:
        """Return the session; None when the volume was not to be up."""
        session = _read(Session, self._session)
        return None if session is None or self._is_copied(session) else session

    def _is_copied(self, session: Session) -> bool:
        known = session.directory and session.is_of_this_boot
        if not known or session.directory == self.identity():
            return False
        # Overlayfs, for one, may give a directory another number while it is in use.
        return all(file != self.sprout_image for _, file in loops_below(self.path))

    def identity(self) -> str:
        """Return a text that tells the directory from its copies."""
        status = self.path.stat()
        return f"{status.st_dev}:{status.st_ino}"

    def forget_copied(self) -> None:
        """Remove what a copy has of the session of its original: who would clean up by
        it would take the original down."""
        session = _read(Session, self._session)
        if session is None or not self._is_copied(session):
            return
        for ledger in self.ledgers.glob("*"):
            ledger.unlink()
        self.forget_session()

    def files(self) -> dict[str, MadeFile]:
        """Return the files by path."""
        return {one.path: one for one in _read_list(MadeFile, self._files, "files")}

    def whole_files(self, most: int | None = None) -> tuple[int, list[MadeFile]]:
        """Return how many files are whole, and the first ones (None: all)."""
        if not most and most is not None and (count := self._count_whole()) is not None:
            return count, []
        keys = _FILES.read(self._files) or {"files": []}
        try:
            whole = [one for one in keys["files"] if one["is_whole"]]
        except (KeyError, TypeError) as error:
            raise _FILES.damaged(self._files, repr(error)) from error
        first = [_FILES.parse(MadeFile, one, self._files) for one in whole[:most]]
        return len(whole), first

    def _count_whole(self) -> int | None:
        """Count files as write_files() has written them. To parse thousands takes a
        hundred times as long."""
        try:
            text = self._files.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError:
            return None
        begin = f'{{"version": {FORMAT_VERSION}, "files": ['.encode()
        # NB: within a path, there is a backslash before each quotation mark.
        is_ours = text.startswith(begin) and text.endswith(b"]}\n")
        return text.count(b'"is_whole": true}') if is_ours else None

    def write_definition(self, definition: VolumeDefinition) -> None:
        _FILES.replace(self._definition, definition.to_toml())

    def write_made(self, made: Made) -> None:
        _FILES.write(self._made, asdict(made))

    def write_session(self, session: Session) -> None:
        _FILES.write(self._session, asdict(session))

    def forget_session(self) -> None:
        self._session.unlink(missing_ok=True)

    def write_files(self, files: dict[str, MadeFile]) -> None:
        # There may be thousands. On one line, they take a tenth of the time.
        keys = {
            "version": FORMAT_VERSION,
            "files": [vars(one) for one in files.values()],
        }
        _FILES.replace(self._files, json.dumps(keys) + "\n")

    def made_trees(self) -> list[MadeTree]:
        return _read_list(MadeTree, self._trees, "trees")

    def write_made_trees(self, trees: list[MadeTree]) -> None:
        _FILES.write(self._trees, {"trees": [asdict(one) for one in trees]})

    def forget_made_tree(self, subvolume: int) -> None:
        if trees := self.made_trees():
            self.write_made_trees([x for x in trees if x.subvolume != subvolume])

    def half_tree(self) -> HalfTree | None:
        """Return the tree that is being added, or that a killed command has left."""
        return _read(HalfTree, self._adding)

    def write_half_tree(self, tree: HalfTree) -> None:
        _FILES.write(self._adding, asdict(tree))

    def forget_half_tree(self) -> None:
        self._adding.unlink(missing_ok=True)

    def rollback(self) -> Rollback | None:
        """Return the rollback that `up` is to complete."""
        return _read(Rollback, self._rollback)

    def write_rollback(self, rollback: Rollback) -> None:
        _FILES.write(self._rollback, asdict(rollback))

    def forget_rollback(self) -> None:
        self._rollback.unlink(missing_ok=True)

    def cache_of(self, definition: VolumeDefinition) -> Path:
        return definition.cache or self.cache

    def target_of(self, definition: VolumeDefinition) -> Path:
        """Return the mount point, with symbolic links resolved."""
        run = Path(os.environ.get(RUN_VARIABLE) or RUN_DIRECTORY)
        # NB: Path.resolve() raises RuntimeError for links in a circle.
        return Path(os.path.realpath(definition.mount or run / "volumes" / self.name))

    def description(self, definition: VolumeDefinition) -> Description:
        """Return the description of its device."""
        with deferred():
            # Importing it takes long, and most commands need none of it.
            from btrfs_ublk.server.description import LazySegment
        seed = self.seed()
        lazy = LazySegment(
            offset=0,
            length=seed.virtual_data.size,
            map=str(self.map),
            cache=str(self.cache_of(definition)),
            deadline_s=definition.deadline_s,
            complete=definition.complete,
            via=_rules(definition),
        )
        return seed.description([lazy])

    def locked(
        self, timeout_s: float = _LOCK_TIMEOUT_S, *, interruptible: bool = False
    ) -> Lock:
        """Lock the volume against other commands; ``interruptible`` as for lock_file().
        Raises BtrfsUblkError, OSError."""
        lock = lock_file(self.lock, timeout_s=timeout_s, interruptible=interruptible)
        if lock is None:
            raise BtrfsUblkError(
                f"another command works on volume {self.name!r} for {timeout_s:g} s",
                hint=f"see which: fuser {self.lock}",
            )
        records = (self._definition, self._made, self._session, self._files)
        remove_unfinished(*records, self._adding, self._rollback, self._trees)
        return lock


def _rules(definition: VolumeDefinition) -> list[dict[str, Any]]:
    if not definition.via:
        return []
    with deferred():
        from btrfs_ublk.base.hosts import Rule
    return [Rule("*", definition.via, definition.via_plain).to_dict()]


def volumes_directory(base: StrPath | None = None, *, make: bool = False) -> Path:
    """Return the directory of all volumes: ``base``, else the environment's, else the
    default; absolute, and without symbolic links.

    Raises BtrfsUblkError when it is not this user's alone, UsageError if not UTF-8.
    """
    if base is None:
        base = os.environ.get(VOLUMES_VARIABLE) or VOLUMES_DIRECTORY
    path = Path(base)
    if not _is_text(path):
        raise UsageError(
            f"the directory of volumes, {str(path)!r}, is not UTF-8",
            hint="descriptions of devices name it: choose another one",
        )
    if make:
        make_private(path, what="directory of volumes", hint=_HINT)
    else:
        check_private(path, what="directory of volumes", hint=_HINT, missing_ok=True)
    return Path(os.path.realpath(path))


def _is_text(path: Path) -> bool:
    try:
        os.path.realpath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def volume_directory(name: str, base: StrPath | None = None) -> VolumeDirectory:
    """Return a volume's directory. Raises UsageError for an invalid name."""
    return VolumeDirectory(volumes_directory(base) / check_name(name))


@contextmanager
def locked_volume(name: str, base: StrPath | None) -> Iterator[VolumeDirectory]:
    """Lock a volume; yield its directory. Raises UsageError when there is none of that
    name, BtrfsUblkError, OSError."""
    volume = volume_directory(name, base)
    volume.check()
    with volume.locked():
        yield volume


def volume_directories(base: StrPath | None = None) -> Iterator[VolumeDirectory]:
    """Yield the directories of all volumes, by name."""
    for path in sorted(volumes_directory(base).glob("[!.]*")):
        volume = VolumeDirectory(path)
        if volume.is_volume():
            yield volume


@dataclass(frozen=True)
class FoundDefinition:
    """``file`` is the administrator's; None for the volume's own, or the defaults
    (``is_default``), which are those of a volume that nobody has defined."""

    definition: VolumeDefinition
    file: Path | None
    is_default: bool = False


def find_definition(name: str, *, base: StrPath | None = None) -> FoundDefinition:
    """Find the definition of a volume: /etc/btrfs-ublk/volumes/NAME.toml, else the one
    it was last brought up with, else the defaults. Raises UsageError.
    """
    volume = volume_directory(name, base)
    config = Path(os.environ.get(CONFIG_VARIABLE) or CONFIG_DIRECTORY)
    file = config / "volumes" / f"{name}.toml"
    if file.exists():
        return FoundDefinition(read_definition(file), file)
    if os.path.lexists(volume.path):
        volume.check()
        return FoundDefinition(volume.definition(), None)
    return FoundDefinition(VolumeDefinition(), None, is_default=True)


def find_own_definition(name: str, *, base: StrPath | None = None) -> VolumeDefinition:
    """Find a volume's definition to change it. Raises UsageError, also for the
    administrator's."""
    found = find_definition(name, base=base)
    if found.file is not None:
        raise UsageError(
            f"volume {name!r} is defined in {found.file}, which this command cannot "
            "change",
            hint=f"write it there, then: btrfs-ublk volume up {name}",
        )
    return found.definition


#: Makes the seed in the directory of a volume; returns what is kept of its image, too.
MakeSeed = Callable[[VolumeDirectory], "tuple[seeds.Seed, dict[str, Any] | None]"]


def open_or_make(
    volume: VolumeDirectory,
    definition: VolumeDefinition,
    make_seed: MakeSeed | None = None,
) -> tuple[Lock, bool]:
    """Lock a volume. Returns the lock, and if it was made: with a seed of virtual data,
    or by ``make_seed``. Signals interrupt only the wait for it. Raises BtrfsUblkError.
    """
    if not os.path.lexists(volume.path):
        if (lock := _make(volume, definition, make_seed)) is not None:
            return lock, True
    volume.check()
    return volume.locked(interruptible=True), False


def _make(
    volume: VolumeDirectory, definition: VolumeDefinition, make_seed: MakeSeed | None
) -> Lock | None:
    """Make the volume; return its lock, None when another command was faster. NB: what
    waits for the disk is done without the registry's lock, for which all volumes that
    are made at once would wait."""
    tag = os.urandom(8).hex()
    half = VolumeDirectory(half_path(volume.path, tag))
    with step(f"make volume {volume.name}"), ExitStack() as on_failure:
        on_failure.callback(remove_tree, half.path, ignore_errors=True)
        try:
            with registry_locked(volume.path.parent):  # for remove_halves()
                half.path.mkdir(mode=0o700)
                lock = lock_file(half.lock)
            assert lock is not None
            on_failure.callback(lock.close)
            half.ledgers.mkdir(mode=0o700)
            image = None
            if make_seed is not None:
                seed, image = make_seed(half)
            else:
                seed = seeds.make_seed(
                    half.seed_image,
                    virtual_data_size=definition.size_bytes,
                    label=volume.name,
                    metadata_only=True,
                )
            half.write_made(
                Made(
                    tag=tag,
                    size_bytes=seed.virtual_data.size,
                    writable_bytes=definition.writable_bytes,
                    seed=seed.to_dict(),
                    image=image,
                )
            )
            half.write_definition(definition)
            # As all else that a volume keeps, it is its owner's alone.
            half.seed_image.chmod(0o600)
            sync(half.seed_image)
            with registry_locked(volume.path.parent):
                if os.path.lexists(volume.path):
                    return None
                half.path.rename(volume.path)
            sync(volume.path.parent)
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot make volume {volume.path}: {error.strerror}",
                hint="is its disk full, or read-only?",
            ) from error
        on_failure.pop_all()
    return lock


def remove_halves(volumes: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove what dead commands left half-made, but not what is being removed now.
    Returns what was, or would be, removed. Raises BtrfsUblkError."""
    if not any(half_made(volumes)):
        return []
    with registry_locked(volumes):  # no half that is made is without its lock
        halves = [
            path
            for path in half_made(volumes)
            if not is_locked(VolumeDirectory(path).lock)
        ]
    with deferred():
        for path in [] if dry_run else halves:
            remove_tree(path, ignore_errors=True)
    return halves


def discard(volume: VolumeDirectory) -> None:
    """Remove a volume's directory with all its data; the caller holds its lock. Raises
    LeftoverError, also when a loop device uses its image.
    """
    for device, image in loops_below(volume.path):
        raise LeftoverError(
            f"volume {volume.name!r} is not removed: {device} is on {image}",
            hint=f"first: btrfs-ublk volume down {volume.name}",
        )
    # The rename frees the name at once, even if the removal is interrupted.
    gone = half_path(volume.path, os.urandom(8).hex())
    try:
        with deferred():
            with registry_locked(volume.path.parent):
                volume.path.rename(gone)
            sync(gone.parent)
        # NB: a large cache takes long, so the registry is unlocked. The cache goes
        # first, as remove_halves() leaves a directory alone while its lock is held.
        for path in (VolumeDirectory(gone).cache, gone):
            while path.is_dir() and not path.is_symlink():
                with suppress(FileNotFoundError):  # another process removes it
                    remove_tree(path)
    except OSError as error:
        raise LeftoverError(f"cannot remove {volume.path}: {error}") from error
