"""The maps of a running server: requests over its control socket that read them and add
to them.

The requests are in csrc/server/request/; docs/materialisation.md explains the terms.
All offsets and lengths are bytes, and multiples of 4096.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass as compiled_dataclass
from dataclasses import replace
from os import fspath
from typing import Any, Protocol

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.content.oci import Resolved, resolve_tags, without_tags
from btrfs_ublk.content.prefetch import Prefetch
from btrfs_ublk.content.refused import Refused
from btrfs_ublk.content.source import Source, SourceKeys
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import BLOCK_BYTES

#: Longer lists are sent in a file: lines are limited (control_connection.h).
_INLINE_MAPPINGS = 1000
_INLINE_BYTES = 512 << 10
_ROW = struct.Struct("<QQ")
_TIMEOUT_S = 60.0
#: How often drain() asks for what fails.
_DRAINS = 3
#: An addition may have to ask for sizes, and to write gigabytes of digests; a page of
#: verify reads the whole file, all digests of a source, and asks up to 16 mirrors.
LONG_TIMEOUT_S = 600.0


class Ask(Protocol):
    """A function that sends a request to a server and returns its reply."""

    def __call__(
        self, name: str, keys: dict[str, Any], *, fd: int | None, timeout_s: float
    ) -> dict[str, Any]:
        """Send a request. Raises Refused for a reply that refuses it, and
        BtrfsUblkError without a reply."""


@compiled_dataclass(frozen=True, kw_only=True)
class Addition:
    """A mapping to add. ``source`` is an index into the request's sources. An
    ``offset`` of None is the lowest free one, or that of an identical mapping from
    before. A ``length`` of None is the rest of the source, up to a whole block."""

    length: int | None = None
    source: int = 0
    source_offset: int = 0
    offset: int | None = None


@compiled_dataclass(frozen=True)
class Added:
    """A mapping that was added: its offset, whether it existed already, and its
    length, which is 0 where the source is empty: nothing is mapped then. The source has
    ``size_bytes`` of it, which may be less than a block less than the length."""

    offset: int
    existed: bool
    length: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """Where to find offsets; by default, in the part of the map that the device
    shows."""

    start: int | None = None
    end: int | None = None
    alignment: int | None = None


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """``source`` is its number in the map. ``digests``: "given" (with the source),
    "pinned" (at first fetch: nothing else vouches for the content) or "computed".
    """

    offset: int
    length: int
    source: int
    source_offset: int
    digests: str

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Problem:
    """A problem that verify() has found. ``source`` is None if it concerns the map
    itself; ``hint`` says what to do, where that is known."""

    text: str
    source: int | None = None
    hint: str | None = None


class MapClient:
    """One map of a server; ``path`` says which one if there are several.

    Methods raise Refused, UsageError for input that is not valid, and BtrfsUblkError
    when the server does not answer.
    """

    def __init__(self, ask: Ask, *, path: StrPath | None = None) -> None:
        self._ask = ask
        self._keys = {} if path is None else {"map": fspath(path)}

    def add(
        self,
        sources: Sequence[Source | SourceKeys],
        additions: Sequence[Addition],
        *,
        room: Room | None = None,
        timeout_s: float = LONG_TIMEOUT_S,
        names: Sequence[str] | None = None,
    ) -> list[Added]:
        """Add all mappings or none. They are durable, and readers see them, when this
        returns. Tags of images are resolved as by resolve(). ``names`` are what errors
        call the sources."""

        def blamed(what: str, number: int) -> str:
            if names is not None:
                return names[number if what == "source" else additions[number].source]
            several = len(sources if what == "source" else additions) > 1
            return f"{what} {number} (counted from 0)" if several else ""

        _refuse_undecoded(list(sources))
        # NB: the server refuses what is no object.
        plain = [
            without_tags(source) if isinstance(source, dict) else source
            for source in self.resolve(sources, names=names)
        ]
        rows = [
            [addition.offset, addition.length, addition.source, addition.source_offset]
            for addition in additions
        ]
        where: dict[str, Any] = {}
        if room is not None:
            where["room"] = _without_none(vars(room))
        if len(rows) <= _INLINE_MAPPINGS:
            keys = where | {"sources": plain, "mappings": rows}
            if len(json.dumps(keys)) < _INLINE_BYTES:
                reply = self._request("map-add", blamed, timeout_s=timeout_s, **keys)
                return _added(additions, reply["added"], reply["sizes"])
        answers, sizes = self._add_in_file(plain, rows, where, timeout_s, blamed)
        return _added(additions, answers, sizes)

    def resolve(
        self,
        sources: Sequence[Source | SourceKeys],
        *,
        resolved: Resolved | None = None,
        names: Sequence[str] | None = None,
    ) -> list[SourceKeys]:
        """Replace ``"tag"`` of each ``oci`` mirror without a ``"digest"`` with the
        digest of the one blob that the tag names now, and set the source's size.

        Each image's name and digest are added to ``resolved``. Raises UsageError for an
        image of several layers, which it lists, or of other platforms. ``names`` are
        what errors call the sources.
        """

        def look_up(mirror: dict[str, Any], name: str) -> dict[str, Any]:
            reply = self._request("map-look-up", mirror=mirror, name=name)
            found: dict[str, Any] = reply["found"]
            return found

        made = []
        for number, source in enumerate(sources):
            try:
                made.append(
                    resolve_tags(dict(source), look_up, resolved)
                    if isinstance(source, dict)
                    else source
                )
            except BtrfsUblkError as error:
                if names is not None:
                    error.prefix(names[number])
                raise
        return made

    def _add_in_file(
        self,
        sources: Sequence[SourceKeys],
        rows: list[list[int | None]],
        where: dict[str, Any],
        timeout_s: float,
        blamed: Callable[[str, int], str],
    ) -> tuple[list[tuple[int, bool, int]], Sequence[int]]:
        fd = os.memfd_create("btrfs-ublk-map-add", os.MFD_CLOEXEC)
        with open(fd, "w+b") as file:
            for line in sources:
                file.write(json.dumps(line).encode() + b"\n")
            # Rows are lists of numbers: one call writes all of them.
            file.write(json.dumps(rows)[1:-1].replace("], [", "]\n[").encode())
            file.flush()
            self._request(
                "map-add", blamed, fd=fd, timeout_s=timeout_s, in_file=True, **where
            )
            count = len(rows)
            answers = os.pread(fd, count * _ROW.size, 0)
            sizes = os.pread(fd, count * 8, len(answers))
        return [
            (word & ~1, bool(word & 1), length)
            for word, length in _ROW.iter_unpack(answers)
        ], struct.unpack(f"<{count}Q", sizes)

    def list(self, *, start: int = 0, end: int | None = None) -> Iterator[Mapping]:
        """List the mappings that overlap [start, end), in order."""
        keys = {} if end is None else {"to": end}
        at: int | None = start
        while at is not None:
            reply = self._request("map-list", **{"from": at}, **keys)
            yield from (Mapping(**mapping) for mapping in reply["mappings"])
            at = reply["next"]

    def show(
        self, *, offset: int | None = None, source: int | None = None
    ) -> dict[str, Any]:
        """Return ``"mapping"``, if there is an offset, and ``"source"``, with its
        description and how many of its units are pinned and cached."""
        return self._request(
            "map-show", **_without_none({"offset": offset, "source": source})
        )

    def verify(self, *, ask_mirrors: bool = False) -> Iterator[Problem]:
        """Check the map file and its lists of digests; and the mirrors, by the sizes
        and identities of their objects. Returns the problems."""
        source: int | None = 0
        while source is not None:
            reply = self._request(
                "map-verify", timeout_s=LONG_TIMEOUT_S, source=source, ask=ask_mirrors
            )
            yield from (Problem(**problem) for problem in reply["problems"])
            source = reply["next"]

    def stats(self) -> dict[str, Any]:
        """Return numbers of mappings, sources and bytes, and what fetcher and cache
        have done."""
        return self._request("map-stats")

    def drain(
        self,
        *,
        start: int = 0,
        end: int | None = None,
        progress: Callable[[Prefetch], None] | None = None,
    ) -> Prefetch:
        """Fetch what is mapped in the range into the cache, and wait for that.
        ``progress`` is called about once per second. What fails is tried again."""
        fetched_units = fetched_bytes = 0
        for _ in range(_DRAINS):
            begun = now = self.prefetch(start=start, end=end, follow=True)
            while now.is_running:
                if progress is not None:
                    progress(now)
                found = self.prefetch_status(follow=begun.id)
                if found is None or found.id != begun.id:
                    raise BtrfsUblkError("it was not all fetched: the server is anew")
                now = found
            fetched_units += now.fetched_units
            fetched_bytes += now.fetched_bytes
            if not now.failed_units:
                break
        return replace(
            now,
            cached_units=now.cached_units + now.fetched_units - fetched_units,
            fetched_units=fetched_units,
            fetched_bytes=fetched_bytes,
        )

    def sources(self) -> Iterator[dict[str, Any]]:
        """List all sources, with "id", "size", "digests", "description", and "key", by
        which a cache has their contents, but not from servers of version 0.2.0."""
        at: int | None = 1
        while at is not None:
            reply = self._request("map-sources", **{"from": at})
            yield from reply["sources"]
            at = reply["next"]

    def prefetch(
        self,
        extents: Sequence[tuple[int, int, int]] | None = None,
        *,
        start: int = 0,
        end: int | None = None,
        bytes_per_s: int = 0,
        at_once: int | None = None,
        follow: bool = False,
    ) -> Prefetch:
        """Start fetching ``extents`` (number of a source, offset and length in it), or
        what is mapped in [start, end), into the cache. The server continues by itself;
        with ``follow``, only while prefetch_status(follow=…) is called."""
        keys = _without_none(
            {"bytes_per_s": bytes_per_s, "at_once": at_once, "follow": follow}
        )
        fd = None
        if extents is None:
            keys |= _without_none({"from": start, "to": end})
        elif len(extents) <= _INLINE_MAPPINGS:
            keys["extents"] = list(extents)
        else:
            fd = os.memfd_create("btrfs-ublk-prefetch", os.MFD_CLOEXEC)
            keys["in_file"] = True
        try:
            if fd is not None and extents is not None:
                with open(fd, "wb", closefd=False) as file:
                    file.writelines(json.dumps(row).encode() + b"\n" for row in extents)
            reply = self._request("prefetch-start", fd=fd, **keys)
        finally:
            if fd is not None:
                os.close(fd)
        begun = Prefetch.parse(reply["prefetch"])
        assert begun is not None
        return begun

    def prefetch_status(self, *, follow: int | None = None) -> Prefetch | None:
        """Return the state of the last prefetch. ``follow`` is its id: waits for its
        end, but at most a second."""
        reply = self._request("prefetch-status", **_without_none({"follow": follow}))
        return Prefetch.parse(reply["prefetch"])

    def prefetch_cancel(self) -> Prefetch | None:
        """End the running prefetch, if there is one. Drops what has not begun."""
        return Prefetch.parse(self._request("prefetch-cancel")["prefetch"])

    def trace_start(self, *, limit: int | None = None) -> int:
        """Record first reads of at most ``limit`` blocks of BLOCK_BYTES. Returns the
        recording's id."""
        keys = _without_none({"limit": limit})
        return int(self._request("trace-start", unit=BLOCK_BYTES, **keys)["id"])

    def trace_read(
        self, recording: int, at: int, *, stop: bool = False
    ) -> dict[str, Any]:
        """Return ``"reads"``, a page of (source, unit, milliseconds) from number
        ``at``, and ``"units"``, ``"lost"``, ``"seconds"``. ``stop`` ends the recording
        after the last page."""
        return self._request(
            "trace-read",
            id=recording,
            **{"from": at},
            **({"stop": True} if stop else {}),
        )

    def _request(
        self,
        name: str,
        blamed: Callable[[str, int], str] | None = None,
        /,
        *,
        fd: int | None = None,
        timeout_s: float = _TIMEOUT_S,
        **keys: Any,
    ) -> dict[str, Any]:
        keys = self._keys | keys
        _refuse_undecoded(keys)
        try:
            return self._ask(name, keys, fd=fd, timeout_s=timeout_s)
        except Refused as error:
            if error.of is not None and blamed is not None:
                if name_of_it := blamed(*error.of):
                    error.prefix(name_of_it)
            if error.errno == "EINVAL":
                raise UsageError(error.message, hint=error.hint) from error
            raise


def _added(
    additions: Sequence[Addition],
    answers: Iterable[tuple[int, bool, int]],
    sizes: Iterable[int],
) -> list[Added]:
    """``sizes`` are those of the additions' sources."""
    return [
        Added(*answer, max(0, min(answer[2], size - addition.source_offset)))
        for addition, answer, size in zip(additions, answers, sizes, strict=True)
    ]


def _without_none(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


def _refuse_undecoded(value: object) -> None:
    """Raise UsageError for bytes that Python could not decode (PEP 383)."""
    try:
        # There may be thousands of texts, and few are wrong.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        _find_undecoded(value)


def _find_undecoded(value: object) -> None:
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"{value!r} is not UTF-8, and servers are asked in JSON, which has"
                    " nothing else",
                    hint="for a file: give it, or a directory above it, another name",
                ) from error
        case dict():
            for key, each in value.items():
                _find_undecoded(key)
                _find_undecoded(each)
        case list() | tuple():
            for each in value:
                _find_undecoded(each)
