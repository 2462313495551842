"""The address space of a device: which segment answers which range
(docs/design/protocol.md).

A kind of segment is one subclass of Segment, whose fields are the keys of the JSON
object. Form and arithmetic are checked here, before anything is made, and again by the
server, which trusts no input. The server checks files when it opens them.
"""

from __future__ import annotations

import errno
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, replace
from itertools import zip_longest
from typing import Any, ClassVar, Literal

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import UsageError
from btrfs_ublk.server.names import MAX_DEADLINE_S
from btrfs_ublk.units import BLOCK_BYTES

FORMAT_VERSION = 1
#: loff_t is signed: the kernel addresses no byte at or above 8 EiB.
MAX_DEVICE_BYTES = (1 << 63) - BLOCK_BYTES

_WORD_BYTES = 8  # A PatternSegment consists of words of this size.
#: This many words are added at once, as a large number. Each is 1 or its byte offset.
_CHUNK_WORDS = 512
_ONES = int.from_bytes((1).to_bytes(_WORD_BYTES, "little") * _CHUNK_WORDS, "little")
_OFFSETS = int.from_bytes(
    b"".join(
        (at * _WORD_BYTES).to_bytes(_WORD_BYTES, "little") for at in range(_CHUNK_WORDS)
    ),
    "little",
)

_kinds: dict[str, type[Segment]] = {}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A range [offset, offset + length) of the device, in bytes."""

    kind: ClassVar[str]

    offset: int
    length: int

    def __init_subclass__(cls) -> None:
        _kinds[cls.kind] = cls

    def __post_init__(self) -> None:
        _check_block("offset", self.offset, self._where)
        _check_block("length", self.length, self._where)
        if self.length == 0:
            raise UsageError(
                f"{self._where}: length is 0", hint="leave the segment out"
            )
        if self.end > MAX_DEVICE_BYTES:
            raise UsageError(f"{self._where} ends beyond {MAX_DEVICE_BYTES} bytes")

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def _where(self) -> str:
        return f"{self.kind} segment [{self.offset}, {self.offset + self.length})"

    def moved(self, by_bytes: int) -> Segment:
        """Return the segment, with the same content, at another offset of the
        device."""
        keys = {key.name: getattr(self, key.name) for key in fields(self)}
        return type(self)(**(keys | {"offset": self.offset + by_bytes}))

    def part(self, start: int, end: int) -> Segment:
        """Return the part within [start, end), which must overlap the segment; its
        content stays."""
        first = max(start, self.offset)
        return replace(self, offset=first, length=min(end, self.end) - first)

    def absolute(self) -> Segment:
        """Return the segment with absolute paths, for a server that starts in another
        directory."""
        return self

    def content(self, offset: int, length: int) -> bytes:
        """Return what a read of [offset, offset + length) of the device must return;
        the server is tested against this. Raises OSError where the read must fail."""
        raise OSError(errno.EIO, f"{self._where} cannot be read")

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            **{
                key.name: getattr(self, key.name)
                for key in fields(self)
                # Keys that have their default value are left out.
                if key.default is MISSING or getattr(self, key.name) != key.default
            },
        }

    @staticmethod
    def from_dict(keys: dict[str, Any]) -> Segment:
        """Parse a segment. Raises UsageError for unknown kinds, and for unknown,
        missing or wrong keys."""
        if not isinstance(keys, dict):
            raise UsageError(f"a segment is {keys!r}, it must be an object")
        keys = dict(keys)
        name = keys.pop("kind", None)
        kind = _kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise UsageError(
                f"segment kind {name!r} is unknown", hint=f"known: {', '.join(_kinds)}"
            )
        _check_keys(
            keys,
            known={key.name for key in fields(kind)},
            required={key.name for key in fields(kind) if key.default is MISSING},
            where=f"{name} segment",
        )
        return kind(**keys)


@dataclass(frozen=True, kw_only=True)
class FileSegment(Segment):
    """A range of a local file or block device. ``direct`` bypasses the page cache."""

    kind: ClassVar[str] = "file"

    path: StrPath
    file_offset: int = 0
    writable: bool = False
    direct: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_block("file_offset", self.file_offset, self._where)
        _keep_texts(self, "path")
        if not isinstance(self.path, str) or not self.path:
            raise UsageError(f"{self._where}: path is {self.path!r}, not a file's name")
        _check_text("path", self.path, self._where)
        for key in ("writable", "direct"):
            _check_bool(key, getattr(self, key), self._where)

    def part(self, start: int, end: int) -> FileSegment:
        first = max(start, self.offset)
        return replace(
            self,
            offset=first,
            length=min(end, self.end) - first,
            file_offset=self.file_offset + first - self.offset,
        )

    def absolute(self) -> FileSegment:
        return replace(self, path=os.path.abspath(self.path))

    def content(self, offset: int, length: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.file_offset + offset - self.offset)
            data = file.read(length)
        if len(data) < length:
            raise OSError(errno.EIO, f"{self._where}: {self.path} is too short")
        return data


@dataclass(frozen=True, kw_only=True)
class ZeroSegment(Segment):
    """A range of zeroes."""

    kind: ClassVar[str] = "zero"

    def content(self, offset: int, length: int) -> bytes:
        return bytes(length)


@dataclass(frozen=True, kw_only=True)
class MemsetSegment(Segment):
    """A range in which every byte is ``byte``."""

    kind: ClassVar[str] = "memset"

    byte: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_integer("byte", self.byte, self._where)
        if not 0 <= self.byte <= 255:
            raise UsageError(f"{self._where}: byte is {self.byte}, not 0 to 255")

    def content(self, offset: int, length: int) -> bytes:
        return bytes([self.byte]) * length


def _counting(first: int, count: int) -> bytes:
    """Return words that count from ``first`` in steps of 8; none may exceed 64 bits."""
    chunks = []
    for at in range(0, count, _CHUNK_WORDS):
        words = min(count - at, _CHUNK_WORDS)
        limit = 1 << 64 * words
        number = _OFFSETS % limit + _ONES % limit * (first + at * _WORD_BYTES)
        chunks.append(number.to_bytes(words * _WORD_BYTES, "little"))
    return b"".join(chunks)


@dataclass(frozen=True, kw_only=True)
class PatternSegment(Segment):
    """A range in which each aligned 8 bytes hold their device offset plus ``base``,
    little-endian."""

    kind: ClassVar[str] = "pattern"

    base: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_integer("base", self.base, self._where)
        if not -(1 << 63) <= self.base < 1 << 63:
            raise UsageError(f"{self._where}: base {self.base} needs more than 64 bits")

    def content(self, offset: int, length: int) -> bytes:
        if offset % _WORD_BYTES or length % _WORD_BYTES:
            start = offset // _WORD_BYTES * _WORD_BYTES
            end = -(-(offset + length) // _WORD_BYTES) * _WORD_BYTES
            return self.content(start, end - start)[offset - start :][:length]
        # Numbers that exceed 64 bits wrap around, as in the server.
        first, count = (offset + self.base) % (1 << 64), length // _WORD_BYTES
        before_wrap = min(count, -(-((1 << 64) - first) // _WORD_BYTES))
        wrapped = (first + before_wrap * _WORD_BYTES) % (1 << 64)
        return _counting(first, before_wrap) + _counting(wrapped, count - before_wrap)

    def moved(self, by_bytes: int) -> PatternSegment:
        """Move the segment; its content is relative to its start."""
        return PatternSegment(
            offset=self.offset + by_bytes, length=self.length, base=self.base - by_bytes
        )


@dataclass(frozen=True, kw_only=True)
class ErrorSegment(Segment):
    """A range whose reads fail (EIO), because it has no content."""

    kind: ClassVar[str] = "error"


@dataclass(frozen=True, kw_only=True)
class LazySegment(Segment):
    """Virtual data that are mapped over time in the file ``map``, and fetched when they
    are read (docs/materialisation.md).

    The segment begins at byte ``map_offset`` of them. Reads of what is not mapped fail
    with EIO, or return zeroes (``unmapped``). A read that no mirror answers fails after
    ``deadline_s`` seconds; with None, it waits for ever. With ``complete``, bytes per
    second or "idle", the server fetches all that is mapped into the cache by itself.
    ``via`` are rules about caches in front of sources, as Rule.to_dict() has them."""

    kind: ClassVar[str] = "lazy"

    map: StrPath
    cache: StrPath | None = None
    map_offset: int = 0
    unmapped: Literal["error", "zero"] = "error"
    deadline_s: float | None = 30
    complete: int | Literal["idle"] | None = None
    via: Sequence[dict[str, Any]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_block("map_offset", self.map_offset, self._where)
        if self.map_offset + self.length > MAX_DEVICE_BYTES:
            raise UsageError(
                f"{self._where}: map_offset {self.map_offset} is too large",
                hint=f"virtual data end at {MAX_DEVICE_BYTES} bytes",
            )
        _keep_texts(self, "map", "cache")
        if not isinstance(self.map, str) or not self.map:
            raise UsageError(f"{self._where}: map is {self.map!r}, not a file's name")
        if self.cache is not None and not (isinstance(self.cache, str) and self.cache):
            raise UsageError(
                f"{self._where}: cache is {self.cache!r}, not a directory's name"
            )
        _check_text("map", self.map, self._where)
        _check_text("cache", self.cache or "", self._where)
        if self.unmapped not in ("error", "zero"):
            raise UsageError(
                f"{self._where}: unmapped is {self.unmapped!r}",
                hint="it is error (reads fail with EIO) or zero",
            )
        _check_deadline(self.deadline_s, self._where)
        _check_complete(self.complete, self.cache, self._where)
        if not isinstance(self.via, list | tuple):
            raise UsageError(f"{self._where}: via is {self.via!r}, not a list")
        object.__setattr__(self, "via", tuple(self.via))

    def part(self, start: int, end: int) -> LazySegment:
        first = max(start, self.offset)
        return replace(
            self,
            offset=first,
            length=min(end, self.end) - first,
            map_offset=self.map_offset + first - self.offset,
        )

    def absolute(self) -> LazySegment:
        cache = self.cache and os.path.abspath(self.cache)
        return replace(self, map=os.path.abspath(self.map), cache=cache)

    def content(self, offset: int, length: int) -> bytes:
        """Raise LookupError, because the content is in the map."""
        raise LookupError(f"{self._where}: what it holds is in {self.map}")


_GAPS: dict[str, type[Segment]] = {"error": ErrorSegment, "zero": ZeroSegment}


def fill(
    start: int, end: int, segments: Iterable[Segment], *, gaps: Literal["error", "zero"]
) -> list[Segment]:
    """Return the segments in order, with the gaps in [start, end) filled.

    Raises UsageError when two segments overlap or one lies outside.
    """
    filled: list[Segment] = []
    position = start
    for segment in sorted(segments, key=lambda segment: segment.offset):
        where = f"{segment.kind} segment [{segment.offset}, {segment.end})"
        if segment.offset < position:
            raise UsageError(
                f"{where} begins before {position}, where "
                f"{'the one before it ends' if filled else 'the range begins'}",
                hint="segments must not overlap",
            )
        if segment.end > end:
            raise UsageError(f"{where} ends after {end}, where the range ends")
        if segment.offset > position:
            gap = segment.offset - position
            filled.append(_GAPS[gaps](offset=position, length=gap))
        filled.append(segment)
        position = segment.end
    if position < end:
        filled.append(_GAPS[gaps](offset=position, length=end - position))
    return filled


@dataclass(frozen=True)
class Description:
    """A whole device: adjacent segments in order, which fill [0, size)."""

    size: int
    segments: Sequence[Segment]
    read_only: bool = True

    def __post_init__(self) -> None:
        _check_block("size", self.size, "description")
        _check_bool("read_only", self.read_only, "description")
        if not 0 < self.size <= MAX_DEVICE_BYTES:
            raise UsageError(
                f"description: size {self.size} is not within (0, {MAX_DEVICE_BYTES}] "
                "bytes"
            )
        object.__setattr__(self, "segments", tuple(self.segments))
        position = 0
        for number, segment in enumerate(self.segments):
            where = f"segment {number} ({segment.kind})"
            if segment.offset != position:
                problem = "overlap" if segment.offset < position else "leave a hole"
                raise UsageError(
                    f"{where} begins at {segment.offset}, the one before it ends at "
                    f"{position}: they {problem}",
                    hint="put them in order; write holes as error or zero segments",
                )
            if self.read_only and getattr(segment, "writable", False):
                raise UsageError(f"{where} is writable, the device is read-only")
            position = segment.end
        if position != self.size:
            raise UsageError(
                f"the segments end at {position}, the device at {self.size}",
                hint="fill the rest with an error or a zero segment",
            )

    @classmethod
    def filled(
        cls,
        size: int,
        segments: Iterable[Segment],
        *,
        gaps: Literal["error", "zero"] = "error",
        read_only: bool = True,
    ) -> Description:
        """Make a description in which the gaps between the segments are filled."""
        return cls(size, fill(0, size, segments, gaps=gaps), read_only)

    def content(self, offset: int, length: int) -> bytes:
        """Return what a read of this range must return; raises OSError where it must
        fail."""
        end = offset + length
        if offset < 0 or end > self.size:
            raise OSError(errno.EIO, f"[{offset}, {end}) is outside of the device")
        starts = [segment.offset for segment in self.segments]
        parts = []
        for segment in self.segments[bisect_right(starts, offset) - 1 :]:
            if segment.offset >= end:
                break
            start = max(offset, segment.offset)
            parts.append(segment.content(start, min(end, segment.end) - start))
        return b"".join(parts)

    def absolute(self) -> Description:
        """Return the description with absolute paths, for a server that starts in
        another directory."""
        return replace(self, segments=[x.absolute() for x in self.segments])

    def check_growth(self, larger: Description) -> None:
        """Raise UsageError, with the reason, unless ``larger`` extends this
        description: the last segment may be longer, and others may follow."""
        if larger.size < self.size:
            raise UsageError(
                f"the device has {self.size} bytes, the new description {larger.size}: "
                "a device never shrinks"
            )
        if larger.read_only != self.read_only:
            raise UsageError(
                f"the device is {'read-only' if self.read_only else 'writable'}, the "
                "new description is not"
            )
        beginning = [
            segment.part(0, self.size)
            for segment in larger.segments
            if segment.offset < self.size
        ]
        for number, (old, new) in enumerate(zip_longest(self.segments, beginning)):
            if old != new:
                was = f"was {old.to_dict()}" if old is not None else "is new"
                raise UsageError(
                    f"segment {number} {was}: the new description says otherwise",
                    hint="what the device answers stays; only what follows its end can "
                    "be new",
                )

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": FORMAT_VERSION,
                "size": self.size,
                "read_only": self.read_only,
                "segments": [segment.to_dict() for segment in self.segments],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Description:
        """Parse a description. Raises UsageError, which names the place, if it is not
        valid."""
        try:
            keys = json.loads(text)
        except ValueError as error:
            raise UsageError(f"the description is no JSON: {error}") from error
        if not isinstance(keys, dict):
            raise UsageError("the description is no JSON object")
        known = {"version", "size", "read_only", "segments"}
        required = {"version", "size", "segments"}
        _check_keys(keys, known=known, required=required, where="description")
        if keys["version"] != FORMAT_VERSION:
            raise UsageError(
                f"description of version {keys['version']!r}, known is "
                f"{FORMAT_VERSION}",
                hint="use the btrfs-ublk that wrote it, or a newer one",
            )
        if not isinstance(keys["segments"], list):
            raise UsageError("description: segments is not a list")
        segments = [Segment.from_dict(segment) for segment in keys["segments"]]
        return cls(keys["size"], segments, keys.get("read_only", True))


def _check_keys(
    keys: dict[str, Any], *, known: set[str], required: set[str], where: str
) -> None:
    for key in sorted(keys.keys() - known):
        hint = f"known: {', '.join(sorted(known))}"
        raise UsageError(f"{where}: key {key!r} is unknown", hint=hint)
    for key in sorted(required - keys.keys()):
        raise UsageError(f"{where}: {key} is missing")


def _check_integer(key: str, value: object, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where}: {key} is {value!r}, not an integer")


def _check_text(key: str, value: str, where: str) -> None:
    """Check that a text can be JSON, which has only valid characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{where}: {key} {value!r} is not UTF-8",
            hint="rename it, or have a directory with another name",
        ) from None


def _keep_texts(segment: Segment, *keys: str) -> None:
    """Convert paths to texts, as descriptions have them."""
    for key in keys:
        value = getattr(segment, key)
        if isinstance(value, os.PathLike):
            object.__setattr__(segment, key, os.fspath(value))


def _check_bool(key: str, value: object, where: str) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{where}: {key} is {value!r}, neither true nor false")


def _check_deadline(value: object, where: str) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MAX_DEADLINE_S:  # type: ignore[operator]
        raise UsageError(
            f"{where}: deadline_s is {value!r}",
            hint=f"it is a number of seconds, over 0 and at most {MAX_DEADLINE_S}, "
            "or null: reads wait for ever",
        )


def _check_complete(value: object, cache: object, where: str) -> None:
    if value is None:
        return
    is_rate = isinstance(value, int) and not isinstance(value, bool)
    is_rate = is_rate and 0 < value < 2**63  # type: ignore[operator]
    if value != "idle" and not is_rate:
        raise UsageError(
            f"{where}: complete is {value!r}",
            hint='it is bytes per second, over 0, or "idle"',
        )
    if cache is None:
        raise UsageError(f"{where}: complete needs a cache", hint="name a directory")


def _check_block(key: str, value: int, where: str) -> None:
    _check_integer(key, value, where)
    if value < 0:
        raise UsageError(f"{where}: {key} {value} is negative")
    if value % BLOCK_BYTES:
        below = value // BLOCK_BYTES * BLOCK_BYTES
        raise UsageError(
            f"{where}: {key} {value} is not a multiple of {BLOCK_BYTES} bytes",
            hint=f"the nearest are {below} and {below + BLOCK_BYTES}",
        )
