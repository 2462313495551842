"""What a kept volume is to be: a small TOML document, read, checked and written.

docs/volumes.md has its keys. A definition says nothing of what there is.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import tomli_w

from btrfs_ublk.device.state import check_limits
from btrfs_ublk.errors import UsageError
from btrfs_ublk.resources.read_ahead import check_read_ahead
from btrfs_ublk.server.description import LazySegment
from btrfs_ublk.server.front_ends import FrontEndName
from btrfs_ublk.sprout import (
    DEFAULT_READ_AHEAD_BYTES,
    DEFAULT_WRITABLE_BYTES,
    MIN_WRITABLE_BYTES,
)
from btrfs_ublk.units import TIB, exact_size, parse_block_size, parse_size
from btrfs_ublk.volumes.entry import VolumeFile

#: One chunk of the seed holds it: more would cost metadata, less would save none.
DEFAULT_SIZE_BYTES = 64 * TIB
DEFAULT_DEADLINE_S = 30.0
#: A read-ahead that is left as it is.
_KERNEL = "kernel"


@dataclass(frozen=True, kw_only=True)
class VolumeDefinition:
    """A kept volume, as it is asked for. Sizes are bytes.

    ``size_bytes`` are its virtual data, ``writable_bytes`` the (sparse) image that
    takes what is written; both stay as they are once the volume is made. ``mount`` is
    an absolute path; None: below the run directory. ``cache`` is a directory that
    several volumes may share; None: one of its own; ``cache_max_bytes`` caps it.
    ``realtime``, ``queues`` and ``depth`` are DeviceOptions', ``read_ahead_bytes`` is
    sprout()'s. A read that no source answers fails after ``deadline_s`` seconds; None:
    it waits for ever.
    """

    size_bytes: int = DEFAULT_SIZE_BYTES
    writable_bytes: int = DEFAULT_WRITABLE_BYTES
    mount: Path | None = None
    front_end: FrontEndName = "auto"
    realtime: bool = False
    queues: int | None = None
    depth: int | None = None
    cache: Path | None = None
    cache_max_bytes: int | None = None
    read_ahead_bytes: int | None = DEFAULT_READ_AHEAD_BYTES
    deadline_s: float | None = DEFAULT_DEADLINE_S
    files: tuple[VolumeFile, ...] = ()

    def __post_init__(self) -> None:
        """Raise UsageError for what no volume can be."""
        parse_block_size(str(self.size_bytes), what="size of a volume")
        parse_block_size(str(self.writable_bytes), what="writable size of a volume")
        if self.writable_bytes < MIN_WRITABLE_BYTES:
            raise UsageError(
                f"writable size {self.writable_bytes}: btrfs needs "
                f"{exact_size(MIN_WRITABLE_BYTES)} at least"
            )
        for what, path in (("mount point", self.mount), ("cache", self.cache)):
            if path is not None and not path.is_absolute():
                raise UsageError(f"{what} {path} is not an absolute path")
        if self.front_end not in get_args(FrontEndName):
            raise UsageError(
                f"there is no front end {self.front_end!r}",
                hint=f"choose {', '.join(get_args(FrontEndName))}",
            )
        check_limits(queues=self.queues, depth=self.depth)
        if self.cache_max_bytes is not None and self.cache_max_bytes <= 0:
            raise UsageError(f"a cache of {self.cache_max_bytes} bytes holds nothing")
        if self.read_ahead_bytes is not None:
            check_read_ahead(self.read_ahead_bytes)
        # It knows what a deadline may be.
        LazySegment(offset=0, length=4096, map="-", deadline_s=self.deadline_s)
        merge_files(self.files, ())

    def with_files(self, more: Sequence[VolumeFile]) -> VolumeDefinition:
        """The same with further entries; those that it has already are not repeated.

        Raises UsageError when a path is to come from two sources.
        """
        return replace(self, files=merge_files(self.files, more))

    def to_toml(self) -> str:
        """What parse_definition() takes back."""
        keys: dict[str, Any] = {
            "size": exact_size(self.size_bytes),
            "writable": exact_size(self.writable_bytes),
            "front_end": self.front_end,
            "realtime": self.realtime,
            "read_ahead": (
                _KERNEL
                if self.read_ahead_bytes is None
                else exact_size(self.read_ahead_bytes)
            ),
            "deadline": self.deadline_s or 0,
        }
        if self.mount is not None:
            keys["mount"] = str(self.mount)
        if self.queues is not None:
            keys["queues"] = self.queues
        if self.depth is not None:
            keys["depth"] = self.depth
        if self.cache is not None:
            keys["cache"] = str(self.cache)
        if self.cache_max_bytes is not None:
            keys["cache_max"] = exact_size(self.cache_max_bytes)
        if self.files:
            keys["file"] = [entry.to_keys() for entry in self.files]
        return tomli_w.dumps(keys)


def merge_files(
    first: Sequence[VolumeFile], more: Sequence[VolumeFile]
) -> tuple[VolumeFile, ...]:
    """All of both, once. Raises UsageError when two sources claim one path, or a file
    is to be the directory of another one.
    """
    found: dict[str, VolumeFile] = {}
    for entry in (*first, *more):
        other = found.setdefault(entry.path, entry)
        if not entry.is_same_as(other):
            raise UsageError(
                f"file {entry.path!r} is to come from two places: {other.origin} and "
                f"{entry.origin}"
            )
    for path in found:
        for parent in PurePosixPath(path).parents:
            if str(parent) in found:
                raise UsageError(f"file {path!r} is to be in {str(parent)!r}, a file")
    return tuple(found.values())


def parse_definition(text: str, *, where: str) -> VolumeDefinition:
    """A definition from TOML; ``where`` names it in errors. Raises UsageError."""
    try:
        keys = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from error
    try:
        return _from_keys(keys)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error


def read_definition(path: Path) -> VolumeDefinition:
    """A definition from a file. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"definition {path}: {why}") from error
    return parse_definition(text, where=str(path))


def parse_read_ahead(text: str, *, what: str) -> int | None:
    """Bytes of a size; None of "kernel": it is left as it is. Raises UsageError."""
    return None if text == _KERNEL else parse_size(text, what=what)


def _from_keys(keys: dict[str, Any]) -> VolumeDefinition:
    given: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in _KEYS:
            raise UsageError(
                f"key {key!r} is unknown", hint=f"there are: {', '.join(_KEYS)}"
            )
        field, parse = _KEYS[key]
        given[field] = parse(value, key)
    return VolumeDefinition(**given)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{key} is {value!r}, not a text in quotes")
    return value


def _size(value: object, key: str) -> int:
    # NB: a bare number is bytes; True is an integer as well.
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return parse_size(_text(value, key), what=key)


def _read_ahead(value: object, key: str) -> int | None:
    if isinstance(value, str):
        return parse_read_ahead(value, what=key)
    return _size(value, key)


def _flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{key} is {value!r}, not true or false")
    return value


def _count(value: object, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{key} is {value!r}, not a whole number")
    return value


def _path(value: object, key: str) -> Path:
    return Path(_text(value, key))


def _deadline(value: object, key: str) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{key} is {value!r}, not a number of seconds")
    return value or None


def _files(value: object, key: str) -> tuple[VolumeFile, ...]:
    if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
        raise UsageError(f"{key} is no list of tables", hint="write [[file]]")
    return tuple(VolumeFile.from_keys(table) for table in value)


#: What each key sets, and how its value is read.
_KEYS: dict[str, tuple[str, Callable[[object, str], object]]] = {
    "size": ("size_bytes", _size),
    "writable": ("writable_bytes", _size),
    "mount": ("mount", _path),
    "front_end": ("front_end", _text),
    "realtime": ("realtime", _flag),
    "queues": ("queues", _count),
    "depth": ("depth", _count),
    "cache": ("cache", _path),
    "cache_max": ("cache_max_bytes", _size),
    "read_ahead": ("read_ahead_bytes", _read_ahead),
    "deadline": ("deadline_s", _deadline),
    "file": ("files", _files),
}
