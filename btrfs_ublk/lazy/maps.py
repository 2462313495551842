"""What a running server has mapped: asked, and added to, by its control socket.

The requests are in csrc/lazy/request/, the words in docs/materialisation.md. All
offsets and lengths are bytes, and multiples of 4096.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.lazy.prefetch import Prefetch

#: A source's description: ``{"kind": "file", "path": …, "size": …, "unit": …}``, or
#: with a list of ``"mirrors"``; ``"digests"`` and ``"root"`` where they are known.
Source = dict[str, Any]

#: More than that comes in a file: a server's line has an end (control_connection.h).
_INLINE_MAPPINGS = 1000
_INLINE_BYTES = 512 << 10
_ROW = struct.Struct("<QQ")
#: A page takes a second or so, and what it waits for ten (drain.c).
_TIMEOUT_S = 60.0
#: An addition may have to ask for sizes, and to write gigabytes of digests; a page of
#: verify reads the whole file, all digests of a source, and asks up to 16 mirrors.
LONG_TIMEOUT_S = 600.0


class Ask(Protocol):
    """How a request comes to a server and its reply back, without the wrapping."""

    def __call__(
        self, name: str, keys: dict[str, Any], *, fd: int | None, timeout_s: float
    ) -> dict[str, Any]:
        """Raises Refused for a reply that says no, and BtrfsUblkError without one."""


class Refused(BtrfsUblkError):
    """The server has said no. ``errno`` is its reason, as a name."""

    def __init__(self, message: str, *, hint: str | None, errno: str) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


@dataclass(frozen=True, kw_only=True)
class Addition:
    """``source`` counts the sources of the request, from 0. An ``offset`` of None is
    the lowest free one, or the one where just this was mapped before. A ``length`` of
    None is the rest of the source, up to a whole block.
    """

    length: int | None = None
    source: int = 0
    source_offset: int = 0
    offset: int | None = None


@dataclass(frozen=True)
class Added:
    """Where; whether the same mapping was there already; and how long it is."""

    offset: int
    existed: bool
    length: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """Where offsets are found; by default, in what the device shows of the map."""

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
    """``source`` is None where it is of the map as a whole."""

    text: str
    source: int | None = None


@dataclass
class Drained:
    """Bytes of units; ``failed`` are examples of the ``failed_units``."""

    fetched_bytes: int = 0
    cached_bytes: int = 0
    failed_units: int = 0
    #: Fetched, but the cache has no room for them.
    uncached_units: int = 0
    failed: list[tuple[int, str]] | None = None


class MapClient:
    """One map of a server; ``path`` says which one, where that has several.

    Methods raise Refused, UsageError for what makes no sense, and BtrfsUblkError when
    the server does not answer.
    """

    def __init__(self, ask: Ask, *, path: str | None = None) -> None:
        self._ask = ask
        self._keys = {} if path is None else {"map": path}

    def add(
        self,
        sources: Sequence[Source],
        additions: Sequence[Addition],
        *,
        room: Room | None = None,
        timeout_s: float = LONG_TIMEOUT_S,
    ) -> list[Added]:
        """All or none; durable, and there for readers, when this returns."""
        rows = [
            [addition.offset, addition.length, addition.source, addition.source_offset]
            for addition in additions
        ]
        where: dict[str, Any] = {}
        if room is not None:
            where["room"] = _without_none(vars(room))
        if len(rows) <= _INLINE_MAPPINGS:
            keys = where | {"sources": list(sources), "mappings": rows}
            if len(json.dumps(keys)) < _INLINE_BYTES:
                reply = self._request("map-add", timeout_s=timeout_s, **keys)
                return [Added(*row) for row in reply["added"]]
        return self._add_in_file(sources, rows, where, timeout_s)

    def _add_in_file(
        self,
        sources: Sequence[Source],
        rows: list[list[int | None]],
        where: dict[str, Any],
        timeout_s: float,
    ) -> list[Added]:
        fd = os.memfd_create("btrfs-ublk-map-add", os.MFD_CLOEXEC)
        with open(fd, "w+b") as file:
            for line in (*sources, *rows):
                file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            self._request("map-add", fd=fd, timeout_s=timeout_s, in_file=True, **where)
            answers = os.pread(fd, len(rows) * _ROW.size, 0)
        return [
            Added(word & ~1, bool(word & 1), length)
            for word, length in _ROW.iter_unpack(answers)
        ]

    def list(self, *, start: int = 0, end: int | None = None) -> Iterator[Mapping]:
        """Those that have bytes of [start, end), in order."""
        keys = {} if end is None else {"to": end}
        at: int | None = start
        while at is not None:
            reply = self._request("map-list", **{"from": at}, **keys)
            yield from (Mapping(**mapping) for mapping in reply["mappings"])
            at = reply["next"]

    def show(
        self, *, offset: int | None = None, source: int | None = None
    ) -> dict[str, Any]:
        """``"mapping"``, if there is an offset, and ``"source"``, with its description
        and how many of its units are pinned and cached.
        """
        return self._request(
            "map-show", **_without_none({"offset": offset, "source": source})
        )

    def verify(self, *, ask_mirrors: bool = False) -> Iterator[Problem]:
        """What is wrong with the map file and its lists of digests; and with the
        mirrors, as far as their objects' sizes and identities tell.
        """
        source: int | None = 0
        while source is not None:
            reply = self._request(
                "map-verify", timeout_s=LONG_TIMEOUT_S, source=source, ask=ask_mirrors
            )
            yield from (Problem(**problem) for problem in reply["problems"])
            source = reply["next"]

    def stats(self) -> dict[str, Any]:
        """Numbers of mappings, sources and bytes; what fetcher and cache have done."""
        return self._request("map-stats")

    def drain(
        self,
        *,
        start: int = 0,
        end: int | None = None,
        progress: Callable[[int, Drained], None] | None = None,
    ) -> Drained:
        """Fetch what is mapped there into the cache. ``progress`` gets the place, each
        second or so.
        """
        keys = {} if end is None else {"to": end}
        total = Drained(failed=[])
        assert total.failed is not None
        at: int | None = start
        while at is not None:
            reply = self._request("map-drain", **{"from": at}, **keys)
            total.fetched_bytes += reply["fetched_bytes"]
            total.cached_bytes += reply["cached_bytes"]
            total.failed_units += reply["failed_units"]
            total.uncached_units += reply["uncached_units"]
            total.failed += [(x["offset"], x["error"]) for x in reply["failed"]]
            at = reply["next"]
            if progress is not None and at is not None:
                progress(at, total)
        return total

    def sources(self) -> Iterator[dict[str, Any]]:
        """All of them, with "id", "size", "digests" and "description"."""
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
        """Have ``extents`` (number of a source, offset and length in it) fetched into
        the cache, or what is mapped in [start, end). The server goes on by itself;
        with ``follow``, only while prefetch_status(follow=…) is called.
        """
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
        """Of the last one. ``follow``: its id; waits for its end, a second at most."""
        reply = self._request("prefetch-status", **_without_none({"follow": follow}))
        return Prefetch.parse(reply["prefetch"])

    def prefetch_cancel(self) -> Prefetch | None:
        """End the one that runs, if one does: what is not begun is dropped."""
        return Prefetch.parse(self._request("prefetch-cancel")["prefetch"])

    def trace_start(self, *, limit: int | None = None) -> int:
        """Record first reads, of ``limit`` units at most. Returns its id."""
        reply = self._request("trace-start", **_without_none({"limit": limit}))
        return int(reply["id"])

    def trace_read(
        self, recording: int, at: int, *, stop: bool = False
    ) -> dict[str, Any]:
        """``"reads"``, a page of (source, unit, milliseconds) from number ``at``, and
        ``"units"``, ``"lost"``, ``"seconds"``. ``stop`` ends it with the last page.
        """
        return self._request(
            "trace-read",
            id=recording,
            **{"from": at},
            **({"stop": True} if stop else {}),
        )

    def _request(
        self,
        name: str,
        *,
        fd: int | None = None,
        timeout_s: float = _TIMEOUT_S,
        **keys: Any,
    ) -> dict[str, Any]:
        try:
            return self._ask(name, self._keys | keys, fd=fd, timeout_s=timeout_s)
        except Refused as error:
            if error.errno == "EINVAL":
                raise UsageError(error.message, hint=error.hint) from error
            raise


def _without_none(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}
