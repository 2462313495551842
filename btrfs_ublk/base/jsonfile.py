"""Records in files: dataclasses as JSON objects with a version.

A file is replaced by rename(2), so readers always see a complete one. A file that is
not valid, or of a newer version, causes an error that names it, and is not removed.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError

_Record = TypeVar("_Record")

_MODE = 0o600


@functools.lru_cache
def _types_of(kind: Hashable) -> dict[str, tuple[set[type], list[object]]]:
    """Return the types that a value of each key may have, or the values themselves.
    They are found once: there may be thousands of records."""
    return {key: _allowed(hint) for key, hint in get_type_hints(kind).items()}


def _allowed(hint: Any) -> tuple[set[type], list[object]]:
    origin, types, values = get_origin(hint), set[type](), list[object]()
    if origin in (Union, UnionType):
        for each in map(_allowed, get_args(hint)):
            types |= each[0]
            values += each[1]
    elif origin is Literal:
        values += get_args(hint)
    else:
        types |= {float, int} if hint is float else {origin or hint}
    return types, values


@dataclass(frozen=True)
class RecordFormat:
    """What files of one kind have in common. ``error`` is raised for invalid files, and
    ``hint_for`` makes its hint from the path. ``synced``: a file that was written
    survives a power cut."""

    version: int
    error: type[BtrfsUblkError]
    hint_for: Callable[[Path], str]
    synced: bool = False

    def damaged(self, path: Path, why: str) -> BtrfsUblkError:
        """Return the error to raise for this file."""
        return self.error(
            f"{path} cannot be used: {why}",
            hint=f"the file was left as it is: {self.hint_for(path)}",
        )

    def read(self, path: Path) -> dict[str, Any] | None:
        """Return the object's keys except its version; None when there is no such
        file."""
        try:
            keys = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self.damaged(path, str(error)) from error
        if not isinstance(keys, dict):
            raise self.damaged(path, "it is not a JSON object")
        version = keys.pop("version", None)
        if isinstance(version, int) and version > self.version:
            raise self.error(
                f"{path} has version {version} of its format, and this btrfs-ublk "
                f"reads version {self.version}",
                hint="use the newer btrfs-ublk that wrote it",
            )
        if version != self.version:
            raise self.damaged(
                path, f"it has version {version!r} of its format, not {self.version}"
            )
        return keys

    def parse(self, kind: type[_Record], keys: object, path: Path) -> _Record:
        """Make the dataclass ``kind`` from ``keys``, which are all or some of the
        file's. NB: the caller checks what is in lists and dictionaries."""
        if not isinstance(keys, dict):
            raise self.damaged(path, f"{keys!r} is no JSON object")
        known = _types_of(cast(Hashable, kind))
        for key, value in keys.items():
            if key not in known:
                raise self.damaged(path, f"it has the unknown key {key!r}")
            types, values = known[key]
            if type(value) not in types and value not in values:
                raise self.damaged(path, f"the value of {key} cannot be {value!r}")
        try:
            return kind(**keys)
        except TypeError as error:  # A key is missing.
            raise self.damaged(path, str(error)) from error

    def write(self, path: Path, keys: dict[str, Any]) -> None:
        """Write the file. Raises BtrfsUblkError, and leaves the previous file in
        place."""
        keys = {"version": self.version, **keys}
        self.replace(path, json.dumps(keys, indent=1) + "\n")

    def replace(self, path: Path, text: str) -> None:
        """Write a file that is no record, like write(), undisturbed by signals."""
        # NB: the writer holds a lock, so there is only one. It can always use the same
        # name, and overwrites what a killed writer left.
        new = _unfinished(path)
        try:
            # NB: descriptions of sources may have secrets in their URLs.
            with deferred():
                with open(new, "w", encoding="utf-8", opener=_open_private) as file:
                    os.fchmod(file.fileno(), _MODE)
                    file.write(text)
                if self.synced:
                    sync(new)
                new.replace(path)
                if self.synced:
                    sync(path.parent)
        except OSError as error:
            raise BtrfsUblkError(f"cannot write {path}: {error.strerror}") from error


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def remove_unfinished(*paths: Path) -> None:
    """Remove what a killed writer of these files has left beside them, for who has just
    got the lock that writers hold: perhaps nobody writes them again. Raises OSError."""
    for path in paths:
        _unfinished(path).unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, _MODE)


def sync(path: Path) -> None:
    """Sync a file or a directory to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
