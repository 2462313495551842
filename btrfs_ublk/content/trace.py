"""Traces of first reads: which blocks were read, in order (docs/prefetch.md).

A trace is a file of JSON lines. It identifies sources by their content, not by numbers
in one map, so that it can be replayed wherever the same content is mapped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import UsageError, why_unread
from btrfs_ublk.units import BLOCK_BYTES

if TYPE_CHECKING:
    from btrfs_ublk.content.maps import MapClient

FORMAT = "btrfs-ublk trace"
#: In version 1, a trace has the units of its sources.
VERSION = 2
#: More than any server records (csrc/lazy/trace.h), with one line per block.
_MAX_BYTES = 256 << 20

#: The keys of a mirror that identify the object. All others may be secret, or have no
#: meaning elsewhere.
_IDENTITY = {
    "file": ("path",),
    "http": ("url", "url_file"),
    "s3": ("endpoint", "region", "bucket", "key", "version_id"),
    "oci": ("registry", "repository", "digest"),
}


@dataclass(frozen=True)
class TraceSource:
    """A source in a trace. ``root`` is its root digest, or None if it has no
    digests; ``unit`` is that of the trace: what its numbers count, in bytes."""

    size: int
    unit: int
    root: str | None
    mirrors: tuple[dict[str, Any], ...]

    @classmethod
    def describe(cls, description: dict[str, Any]) -> TraceSource:
        """Make the entry of a source from its description in a map."""
        return cls(
            size=int(description["size"]),
            unit=int(description["unit"]),
            root=description.get("root"),
            mirrors=tuple(_identity(one) for one in description["mirrors"]),
        )

    def is_same(self, other: TraceSource) -> bool:
        """Whether it is the same source, as far as that can be told: by its digests,
        or, if one has none, by a common mirror."""
        if self.root is not None and other.root is not None:
            return self.root == other.root
        return self.size == other.size and any(
            len(mirror) > 1 and mirror in other.mirrors for mirror in self.mirrors
        )

    def __str__(self) -> str:
        if self.mirrors:
            words = (str(word) for word in self.mirrors[0].values())
            return " ".join(words)
        return self.root or "?"


def _identity(mirror: dict[str, Any]) -> dict[str, Any]:
    kind = str(mirror.get("kind"))
    found = {"kind": kind}
    for key in _IDENTITY.get(kind, ()):
        value = mirror.get(key)
        if value is not None:
            found[key] = _without_query(value) if key in ("url", "endpoint") else value
    return found


def _without_query(url: str) -> str:
    """Remove the query, which has the signature of a signed URL."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


@dataclass(frozen=True)
class Reads:
    """A run of ``count`` units that were first read at that time."""

    source: int
    unit: int
    count: int
    at_ms: int


class TraceWriter:
    """Writes lines as they come. ``end`` marks the trace as complete."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._sources: set[int] = set()
        self.units = 0
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._line({"format": FORMAT, "version": VERSION, "recorded": now})

    def add(
        self,
        reads: Iterable[tuple[int, int, int]],
        describe: Callable[[int], TraceSource],
    ) -> None:
        """Add reads of (source, unit, milliseconds); ``describe`` is called once per
        source. If a signal ends this, either all of them are in ``units``, or none is
        and none is written."""
        runs = list(_runs(reads))
        numbers = {run.source for run in runs} - self._sources
        described = {number: describe(number) for number in sorted(numbers)}
        with deferred():
            for number, source in described.items():
                self._line({"source": number} | vars(source))
                self._sources.add(number)
            for run in runs:
                self._line([run.source, run.unit, run.count, run.at_ms])
                self.units += run.count
            self._file.flush()

    def end(self, *, lost: int, seconds: float) -> None:
        self._line({"end": True, "units": self.units, "lost": lost, "seconds": seconds})

    def _line(self, value: object) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")


class Recording:
    """A recording that a server makes, being written to a file."""

    def __init__(self, client: MapClient, number: int, writer: TraceWriter) -> None:
        self._client = client
        self._number = number
        self._writer = writer

    def take(self, *, stop: bool = False) -> int:
        """Write what has come since the last call. Returns how many blocks."""
        taken = 0
        while True:
            page = self._client.trace_read(self._number, self._writer.units, stop=stop)
            reads = [(source, unit, at_ms) for source, unit, at_ms in page["reads"]]
            self._writer.add(reads, self._describe)
            taken += len(reads)
            self.lost, self.seconds = int(page["lost"]), float(page["seconds"])
            if not reads or self._writer.units >= int(page["units"]):
                return taken

    @deferred()  # a signal may come as the recording ends by itself
    def finish(self) -> tuple[int, int]:
        """Return how many blocks there are, and how many reads were lost."""
        self.take()
        self.take(stop=True)
        self._writer.end(lost=self.lost, seconds=self.seconds)
        return self._writer.units, self.lost

    def _describe(self, source: int) -> TraceSource:
        found = TraceSource.describe(
            self._client.show(source=source)["source"]["description"]
        )
        return replace(found, unit=BLOCK_BYTES)


def _runs(reads: Iterable[tuple[int, int, int]]) -> Iterator[Reads]:
    """Merge consecutive units into one line, with the time of the first."""
    run: Reads | None = None
    for source, unit, at_ms in reads:
        if run and run.source == source and run.unit + run.count == unit:
            run = Reads(source, run.unit, run.count + 1, run.at_ms)
            continue
        if run:
            yield run
        run = Reads(source, unit, 1, at_ms)
    if run:
        yield run


@dataclass
class Trace:
    """A trace. ``lost`` is None if the recording was cut off."""

    sources: dict[int, TraceSource] = field(default_factory=dict)
    reads: list[Reads] = field(default_factory=list)
    lost: int | None = None

    @property
    def units(self) -> int:
        return sum(run.count for run in self.reads)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Load a trace. Raises UsageError, with the line, if it is no trace of this
        version."""
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise UsageError(f"{path}: too long for a trace")
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: {why_unread(error)}") from error
        trace = cls()
        head = _parse(lines[0]) if lines else None
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise UsageError(
                f"{path}: not a trace", hint="`btrfs-ublk trace record` makes them"
            )
        if head.get("version") not in (1, VERSION):
            raise UsageError(
                f"{path}: a trace of version {head.get('version')!r}, not {VERSION}",
                hint="use the btrfs-ublk that recorded it, or a newer one",
            )
        for number, line in enumerate(lines[1:], 2):
            # A trace that was cut off may end with an incomplete line.
            if not trace._take(_parse(line)) and number < len(lines):
                raise UsageError(f"{path}, line {number}: not a line of a trace")
        return trace

    def _take(self, value: object) -> bool:
        match value:
            case {
                "source": int(number),
                "size": int(size),
                "unit": int(unit),
                "root": str() | None as root,
                "mirrors": list(mirrors),
            } if (
                unit > 0
            ):
                known = tuple(one for one in mirrors if isinstance(one, dict))
                self.sources[number] = TraceSource(size, unit, root, known)
            case [int(source), int(unit), int(count), int(at_ms)] if (
                source in self.sources and unit >= 0 and count > 0
            ):
                self.reads.append(Reads(source, unit, count, at_ms))
            case {"end": True, "lost": int(lost)}:
                self.lost = lost
            case _:
                return False
        return True

    def extents(
        self, known: Sequence[tuple[int, TraceSource]]
    ) -> tuple[list[tuple[int, int, int]], dict[int, int]]:
        """Return what to prefetch, as (source of the map, offset, length) in bytes, in
        a map with the sources ``known``: whole units of it, each once. And what the map
        lacks, as units of the trace by source."""
        found = {number: _find(one, known) for number, one in self.sources.items()}
        taken: set[tuple[int, int]] = set()
        extents: list[tuple[int, int, int]] = []
        missing: dict[int, int] = {}
        for run in self.reads:
            there = found[run.source]
            if there is None:
                missing[run.source] = missing.get(run.source, 0) + run.count
                continue
            number, source = there
            for unit in self.units_of(run, source.unit, source.size):
                if (number, unit) in taken:
                    continue
                taken.add((number, unit))
                last = extents[-1] if extents else (-1, 0, 0)
                if last[0] == number and last[1] + last[2] == unit * source.unit:
                    extents.pop()
                    extents.append((number, last[1], last[2] + source.unit))
                else:
                    extents.append((number, unit * source.unit, source.unit))
        return extents, missing

    def units_of(self, run: Reads, unit: int, size: int) -> range:
        """Return the numbers of the units of ``unit`` bytes that a run has read of a
        source of ``size``."""
        start = min(run.unit * self.sources[run.source].unit, size)
        end = min((run.unit + run.count) * self.sources[run.source].unit, size)
        return range(start // unit, -(-end // unit) if end > start else start // unit)


def _find(
    source: TraceSource, known: Sequence[tuple[int, TraceSource]]
) -> tuple[int, TraceSource] | None:
    """Find the source in the map. Sources with the same digests are preferred, since
    they are certain."""
    same = [each for each in known if source.is_same(each[1])]
    same.sort(key=lambda found: found[1].root != source.root)
    return same[0] if same else None


def _parse(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None
