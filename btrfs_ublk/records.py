"""Records in files: dataclasses as JSON objects with a version.

A file is replaced by rename(2), so whoever reads one sees it whole. One that makes no
sense, or is of a newer version, is an error that names it, and nobody removes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from btrfs_ublk.errors import BtrfsUblkError

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class RecordFormat:
    """What files of one kind have in common. ``error`` is raised for those that make no
    sense, with the hint that ``cure`` has for that path. ``synced``: what was written
    survives a power cut.
    """

    version: int
    error: type[BtrfsUblkError]
    cure: Callable[[Path], str]
    synced: bool = False

    def damaged(self, path: Path, why: str) -> BtrfsUblkError:
        """To be raised."""
        return self.error(
            f"{path} makes no sense: {why}", hint=f"left as it is: {self.cure(path)}"
        )

    def read(self, path: Path) -> dict[str, Any] | None:
        """The object's keys but its version; None when there is no such file."""
        try:
            keys = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self.damaged(path, str(error)) from error
        if not isinstance(keys, dict):
            raise self.damaged(path, "it is no JSON object")
        version = keys.pop("version", None)
        if isinstance(version, int) and version > self.version:
            raise self.error(
                f"{path} is of version {version}, this is btrfs-ublk for version "
                f"{self.version}",
                hint="use the newer btrfs-ublk that wrote it",
            )
        if version != self.version:
            raise self.damaged(path, f"it is of version {version!r}")
        return keys

    def parse(self, kind: type[_Record], keys: object, path: Path) -> _Record:
        """The dataclass ``kind`` of ``keys``, which are the file's or a part of them.
        NB: what is in lists and dictionaries, their reader checks.
        """
        if not isinstance(keys, dict):
            raise self.damaged(path, f"{keys!r} is no JSON object")
        known = get_type_hints(kind)
        for key, value in keys.items():
            if key not in known:
                raise self.damaged(path, f"key {key!r} is unknown")
            if not _is_a(value, known[key]):
                raise self.damaged(path, f"{key} is {value!r}")
        try:
            return kind(**keys)
        except TypeError as error:  # one is missing
            raise self.damaged(path, str(error)) from error

    def write(self, path: Path, keys: dict[str, Any]) -> None:
        """Raises BtrfsUblkError; what was there before is there then."""
        keys = {"version": self.version, **keys}
        self.replace(path, json.dumps(keys, indent=1) + "\n")

    def replace(self, path: Path, text: str) -> None:
        """As write(), for a file that is no record."""
        # NB: one writer at a time (it holds the lock), so one name will do, and what a
        # killed writer left is overwritten.
        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text(text, encoding="utf-8")
            if self.synced:
                sync(new)
            new.replace(path)
            if self.synced:
                sync(path.parent)
        except OSError as error:
            raise BtrfsUblkError(f"cannot write {path}: {error.strerror}") from error


def sync(path: Path) -> None:
    """Have a file or a directory on disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_a(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_a(value, each) for each in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if isinstance(value, bool):  # which Python takes for an integer
        return hint is bool
    if hint is float:
        return isinstance(value, float | int)
    return isinstance(value, origin or hint)
