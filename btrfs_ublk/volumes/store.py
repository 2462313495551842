"""What is kept of a volume, on disk: one directory each (docs/volumes.md).

They survive a boot, so what is written here is synced. Root believes what stands there:
directories are of mode 0700 and ours. Files are replaced by rename(2).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

from btrfs_ublk.device.locks import Lock, lock_file
from btrfs_ublk.device.state import RUN_DIRECTORY, RUN_VARIABLE, check_name
from btrfs_ublk.directories import check_private, make_private
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.lazy import Source
from btrfs_ublk.ledger import boot_id
from btrfs_ublk.records import RecordFormat
from btrfs_ublk.seed import Seed
from btrfs_ublk.seed.mega_extent import parse_report
from btrfs_ublk.server.description import Description, LazySegment
from btrfs_ublk.volumes.definition import VolumeDefinition, read_definition

VOLUMES_VARIABLE = "BTRFS_UBLK_VOLUMES_DIR"
VOLUMES_DIRECTORY = "/var/lib/btrfs-ublk/volumes"
FORMAT_VERSION = 1

_HINT = f"run as root, or name a directory of yours in {VOLUMES_VARIABLE}"


class DamagedVolumeError(BtrfsUblkError):
    """A volume's files make no sense; nothing was done to them."""


_FILES = RecordFormat(
    FORMAT_VERSION,
    DamagedVolumeError,
    lambda _path: "correct it, or bring it back from a backup",
    synced=True,
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was made once (volume.json). ``seed`` is a Seed's, with another path;
    ``fsid`` is the sprout's, None as long as there is none.
    """

    tag: str
    size_bytes: int
    writable_bytes: int
    seed: dict[str, Any]
    fsid: str | None = None


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where a volume is up, or was to be (session.json). ``made_target``: the mount
    point was not there before.
    """

    boot_id: str
    target: str
    made_target: bool

    @property
    def is_of_this_boot(self) -> bool:
        return self.boot_id == boot_id()


@dataclass(frozen=True, kw_only=True)
class MadeFile:
    """A file that was cloned into the volume (files.json): ``size_bytes`` of the
    virtual data from ``offset`` on. Not ``is_whole``: it was to be.
    """

    path: str
    source: Source
    offset: int
    size_bytes: int
    is_whole: bool


class VolumeDirectory:
    """One volume's files, at ``path``. Making it touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.lock = path / "lock"
        self.seed_image = path / "seed.img"
        self.sprout_image = path / "sprout.img"
        self.map = path / "map"
        #: Unless the definition names another one.
        self.cache = path / "cache"
        #: Where the seed is mounted while it sprouts: nobody else sees it.
        self.sprouting = path / "sprouting"
        #: Of what outlives the command that made it.
        self.ledgers = path / "ledgers"
        self._definition = path / "definition.toml"
        self._made = path / "volume.json"
        self._session = path / "session.json"
        self._files = path / "files.json"

    def is_volume(self) -> bool:
        """Whether there is a volume, if a damaged one: what only volumes have.

        NB: images of that name may lie in anybody's directory.
        """
        records = (self._made, self._definition)
        return any(map(os.path.isfile, records)) or (
            os.path.isfile(self.seed_image) and os.path.isdir(self.ledgers)
        )

    def check(self) -> None:
        """Raise UsageError when there is no such volume, BtrfsUblkError when the
        directory is not ours alone.
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

    def definition(self) -> VolumeDefinition:
        return read_definition(self._definition)

    def made(self) -> Made:
        keys = _FILES.read(self._made)
        if keys is None:
            raise _FILES.damaged(self._made, "it is missing")
        return _FILES.parse(Made, keys, self._made)

    def seed(self) -> Seed:
        """The seed, where it is now."""
        seed = parse_report(json.dumps(self.made().seed))
        return replace(seed, path=self.seed_image)

    def fsid(self) -> UUID | None:
        """The sprout's; None when it has not been made."""
        text = self.made().fsid
        try:
            return None if text is None else UUID(text)
        except ValueError as error:
            raise _FILES.damaged(self._made, f"fsid {text!r} is no UUID") from error

    def session(self) -> Session | None:
        """None when it was not to be up."""
        keys = _FILES.read(self._session)
        return None if keys is None else _FILES.parse(Session, keys, self._session)

    def files(self) -> dict[str, MadeFile]:
        """By path."""
        keys = _FILES.read(self._files) or {"files": []}
        try:
            return {
                one["path"]: _FILES.parse(MadeFile, one, self._files)
                for one in keys["files"]
            }
        except (KeyError, TypeError) as error:
            raise _FILES.damaged(self._files, repr(error)) from error

    def write_definition(self, definition: VolumeDefinition) -> None:
        _FILES.replace(self._definition, definition.to_toml())

    def write_made(self, made: Made) -> None:
        _FILES.write(self._made, asdict(made))

    def write_session(self, session: Session) -> None:
        _FILES.write(self._session, asdict(session))

    def forget_session(self) -> None:
        self._session.unlink(missing_ok=True)

    def write_files(self, files: dict[str, MadeFile]) -> None:
        _FILES.write(self._files, {"files": [asdict(one) for one in files.values()]})

    def cache_of(self, definition: VolumeDefinition) -> Path:
        return definition.cache or self.cache

    def target_of(self, definition: VolumeDefinition) -> Path:
        """The mount point, resolved."""
        run = Path(os.environ.get(RUN_VARIABLE) or RUN_DIRECTORY)
        return (definition.mount or run / "volumes" / self.name).resolve()

    def description(self, definition: VolumeDefinition) -> Description:
        """Of its device."""
        seed = self.seed()
        lazy = LazySegment(
            offset=0,
            length=seed.virtual_data.size,
            map=str(self.map),
            cache=str(self.cache_of(definition)),
            deadline_s=definition.deadline_s,
        )
        return seed.description([lazy])

    def locked(self, *, timeout_s: float) -> Lock:
        """Nobody else works on it meanwhile. Raises BtrfsUblkError."""
        lock = lock_file(self.lock, timeout_s=timeout_s)
        if lock is None:
            raise BtrfsUblkError(
                f"another command works on volume {self.name!r} for {timeout_s:g} s",
                hint=f"see which: fuser {self.lock}",
            )
        return lock


def volumes_directory(base: Path | None = None, *, make: bool = False) -> Path:
    """Where the directories of all volumes are: ``base``, or the one that the
    environment names, or the usual one; absolute, and without symbolic links.

    Raises BtrfsUblkError when it is not ours alone.
    """
    path = base or Path(os.environ.get(VOLUMES_VARIABLE) or VOLUMES_DIRECTORY)
    if make:
        make_private(path, what="directory of volumes", hint=_HINT)
    else:
        check_private(path, what="directory of volumes", hint=_HINT, missing_ok=True)
    return Path(os.path.realpath(path))


def volume_directory(name: str, base: Path | None = None) -> VolumeDirectory:
    """Raise UsageError when the name is none."""
    return VolumeDirectory(volumes_directory(base) / check_name(name))


def volume_directories(base: Path | None = None) -> Iterator[VolumeDirectory]:
    """Of all volumes, by name."""
    for path in sorted(volumes_directory(base).glob("[!.]*")):
        volume = VolumeDirectory(path)
        if volume.is_volume():
            yield volume
