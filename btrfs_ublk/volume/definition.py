"""The definition of a kept volume: a small TOML document, read, checked and written.

docs/volumes.md explains its keys. A definition is the wanted state, not the actual one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import tomli_w

from btrfs_ublk.base.paths import OptionalPath, StrPath
from btrfs_ublk.device.state import check_limits
from btrfs_ublk.errors import UsageError, why_unread
from btrfs_ublk.kernel.btrfs import DEFAULT_WRITABLE_BYTES, MIN_WRITABLE_BYTES
from btrfs_ublk.kernel.read_ahead import DEFAULT_READ_AHEAD_BYTES, check_read_ahead
from btrfs_ublk.server.description import MAX_DEADLINE_S, FrontEndName, LazySegment
from btrfs_ublk.units import TIB, exact_size, parse_block_size, parse_size
from btrfs_ublk.volume.entry import VolumeFile, check_text

#: One chunk of the seed holds this; more would cost metadata, less would save none.
DEFAULT_SIZE_BYTES = 64 * TIB
DEFAULT_DEADLINE_S = 30.0
#: The value that leaves the kernel's read-ahead unchanged.
_KERNEL = "kernel"


@dataclass(frozen=True, kw_only=True)
class VolumeDefinition:
    """The wanted state of a kept volume. Sizes are bytes.

    ``size_bytes`` is the size of its virtual data, which never changes once the volume
    is made. ``writable_bytes`` is that of the (sparse) image for written data; it only
    grows. ``mount`` is an absolute path; None means below the run directory. ``cache``
    is a directory that several volumes may share; None means one of its own.
    ``cache_max_bytes`` limits its size. ``realtime``, ``queues`` and ``depth`` are as
    for DeviceOptions, ``read_ahead_bytes`` as for sprout(). A read that no source
    answers fails after ``deadline_s`` seconds; with None it waits for ever.
    """

    size_bytes: int = DEFAULT_SIZE_BYTES
    writable_bytes: int = DEFAULT_WRITABLE_BYTES
    mount: OptionalPath = OptionalPath()
    front_end: FrontEndName = "auto"
    realtime: bool = False
    queues: int | None = None
    depth: int | None = None
    cache: OptionalPath = OptionalPath()
    cache_max_bytes: int | None = None
    read_ahead_bytes: int | None = DEFAULT_READ_AHEAD_BYTES
    deadline_s: float | None = DEFAULT_DEADLINE_S
    files: tuple[VolumeFile, ...] = ()

    def __post_init__(self) -> None:
        """Raise UsageError for values that no volume can have."""
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
            check_text(str(path), what)
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
        try:  # it checks deadlines
            LazySegment(offset=0, length=4096, map="-", deadline_s=self.deadline_s)
        except UsageError as error:
            raise UsageError(
                f"the deadline cannot be {self.deadline_s} s",
                hint=f"it is at most {MAX_DEADLINE_S} s; with 0, reads wait for ever",
            ) from error
        merge_files(self.files, ())

    def with_files(self, more: Sequence[VolumeFile]) -> VolumeDefinition:
        """Return the definition with further files, without duplicates.

        Raises UsageError when a path is to come from two sources.
        """
        return replace(self, files=merge_files(self.files, more))

    def to_toml(self) -> str:
        """Return the text that parse_definition() reads."""
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
    """Return the files of both sequences without duplicates. Raises UsageError when two
    sources claim one path, or a file is also the directory of another one.
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
    """Parse a definition from TOML; ``where`` names it in errors. Raises UsageError."""
    try:
        keys = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from error
    try:
        return _from_keys(keys)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error


def read_definition(path: StrPath) -> VolumeDefinition:
    """Read a definition from a file. Raises UsageError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"definition {path}: {why_unread(error)}") from error
    return parse_definition(text, where=str(path))


def parse_read_ahead(text: str, *, what: str) -> int | None:
    """Return a size in bytes, or None for "kernel". Raises UsageError."""
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
    # NB: a bare number is bytes, and bool is a subclass of int.
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


#: The field that each key sets, and the function that parses its value.
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
