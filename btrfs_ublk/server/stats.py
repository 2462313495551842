"""Parse a server's statistics: counts, latencies, queues (csrc/server/stats.h)."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from btrfs_ublk.content.completion import Completion
from btrfs_ublk.content.prefetch import Prefetch
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.units import MIB


@dataclass(frozen=True)
class Latency:
    """A histogram of durations in nanoseconds, from when the front end gave a request
    to the engine until it was answered.

    A bucket is (the longest duration in it, how many); it is at most 12.5 % wide. For
    segment kinds that answer at once, the server times only one round in four.
    """

    sum_ns: int = 0
    max_ns: int = 0
    buckets: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """How many durations were timed."""
        return sum(count for _, count in self.buckets)

    def percentile_ns(self, percent: float) -> float:
        """Return the duration that this share does not exceed. It is up to 12.5 % too
        long, but never longer than the longest. NaN if nothing was timed."""
        if not 0 < percent <= 100:
            raise ValueError(f"percentile {percent} is not in (0, 100]")
        # NB: round() is needed because 99.9 / 100 * 1000 is a little more than 999.
        rank = math.ceil(round(percent / 100 * self.count, 6))
        below = 0
        for bound_ns, count in self.buckets:
            below += count
            if below >= rank:
                return min(bound_ns, self.max_ns)
        return math.nan

    def __add__(self, other: Latency) -> Latency:
        counts = dict(self.buckets)
        for bound_ns, count in other.buckets:
            counts[bound_ns] = counts.get(bound_ns, 0) + count
        return Latency(
            sum_ns=self.sum_ns + other.sum_ns,
            max_ns=max(self.max_ns, other.max_ns),
            buckets=tuple(sorted(counts.items())),
        )

    def since(self, before: Latency) -> Latency:
        """Return what was added after ``before``, an earlier state of the same
        histogram. Its longest duration is only the bound of the uppermost bucket."""
        earlier = dict(before.buckets)
        counts = [
            (bound_ns, count - earlier.get(bound_ns, 0))
            for bound_ns, count in self.buckets
        ]
        buckets = tuple((bound_ns, count) for bound_ns, count in counts if count)
        return Latency(
            sum_ns=self.sum_ns - before.sum_ns,
            max_ns=min(self.max_ns, buckets[-1][0]) if buckets else 0,
            buckets=buckets,
        )


@dataclass(frozen=True)
class Counts:
    """Numbers of requests (of their parts, if they span segments), bytes and errors."""

    errors: int
    reads: int
    read_bytes: int
    writes: int
    write_bytes: int
    flushes: int
    discards: int
    discard_bytes: int
    write_zeroes: int
    write_zeroes_bytes: int


@dataclass(frozen=True)
class Latencies:
    """Latencies by operation; discards and zeroes count as writes."""

    reads: Latency = Latency()
    writes: Latency = Latency()
    flushes: Latency = Latency()


@dataclass(frozen=True)
class KindStats(Counts):
    """Statistics of one segment kind."""

    latency: Latencies = Latencies()


@dataclass(frozen=True)
class QueueStats:
    """Statistics of one thread of the front end: requests that it has not answered
    yet."""

    in_flight: int
    max_in_flight: int


@dataclass(frozen=True)
class FetchLatency:
    """Latency of successful requests to mirrors of one kind and host, until the last
    byte; ``host`` is empty for files of this machine."""

    kind: str
    host: str
    latency: Latency


@dataclass(frozen=True)
class FetcherStats:
    """Statistics of what fetches the units of one map (csrc/lazy/fetcher.h).

    ``reads`` counts those that the cache did not answer. A unit is ``verified`` against
    a known digest, or ``pinned`` when it is fetched for the first time. ``failures``
    counts failed attempts by reason. ``hosts`` has one object per host, with
    "attempts", "failures", "bytes", "in_flight", "openings" and "open" (of its circuit
    breaker). ``disk_errors`` has the last error of the disk of the
    "map" or the "cache", until a write succeeds: "errno", a name, and "age_s".
    ``reads_waiting`` to ``buffer_bytes`` are the present numbers, and so is
    ``unstored_bytes``: units that were delivered, and wait for the cache.
    ``store_drops`` counts those that it took too long to take. ``process`` is about the
    process that asks servers: "running", how many have "started", "died", or
    "failed" to start, and what it "lacks" of its confinement. ``coded_bytes_fetched``
    are those of compressed sources, as they came. ``whole_answers`` counts requests for
    a range that were answered with all of the object, and ``whole_units`` what came
    with them that nobody waited for. ``failed_source`` is the number of that of the
    last read that failed, in the map, or 0."""

    reads: int
    read_errors: int
    deadlines_missed: int
    attempts: int
    retries: int
    units_fetched: int
    bytes_fetched: int
    units_prefetched: int
    units_verified: int
    units_pinned: int
    units_from_cache: int
    units_stored: int
    store_failures: int
    reads_waiting: int
    units_queued: int
    units_in_flight: int
    buffer_bytes: int
    failures: Mapping[str, int]
    hosts: Mapping[str, Mapping[str, Any]]
    fetches: tuple[FetchLatency, ...]
    disk_errors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    process: Mapping[str, Any] = field(default_factory=dict)
    store_drops: int = 0
    unstored_bytes: int = 0
    coded_bytes_fetched: int = 0
    whole_answers: int = 0
    whole_units: int = 0
    failed_source: int = 0


#: The consequences of a disk that cannot be written, by what is on it.
_WITHOUT_ROOM = {
    "map": "reads of data that have no digests, and were not read before, fail",
    "cache": "fetched data are not cached",
}


@dataclass(frozen=True)
class LazyStats:
    """Statistics of one map and its cache (docs/cache.md)."""

    map: str
    cache_directory: str | None
    mappings: int
    fetcher: FetcherStats
    cache: Mapping[str, Any] | None
    prefetch: Prefetch | None = None
    complete: Completion | None = None

    def disk_problems(self) -> list[str]:
        """Describe what the disks of map and cache refuse, and what to do, for
        people."""
        return [
            self._disk_problem(what, str(error["errno"]), float(error["age_s"]))
            for what, error in self.fetcher.disk_errors.items()
        ]

    def _disk_problem(self, what: str, name: str, age_s: float) -> str:
        directory = os.path.dirname(self.map)
        if what == "cache":
            directory = self.cache_directory or ""
        then = f"{_WITHOUT_ROOM.get(what, '')} (tried {age_s:.0f} s ago)"
        if name not in ("ENOSPC", "EDQUOT"):
            reason = os.strerror(getattr(errno, name, errno.EIO))
            return f"{what} cannot be written in {directory}: {reason}; {then}"
        if what == "cache" and not self._is_cache_disk_full():
            return f"cache full, with nothing in it that may go: {directory}; {then}"
        return f"disk full: make room in {directory}; {then}"

    def _is_cache_disk_full(self) -> bool:
        """Return whether the disk is full, and not just the cache's own limit
        reached."""
        about = self.cache or {}
        limit = int(about.get("max_bytes", 0))
        left = int(about.get("free_bytes", 0)) - int(about.get("reserve_bytes", 0))
        return not limit or left < MIB  # The largest unit has 1 MiB.


@dataclass(frozen=True)
class ServerStats(Counts, dict[str, Any]):
    """All statistics of a server; made by ``BlockServer.stats()``.

    ``refused`` counts requests that failed before they reached a segment: out of range,
    too long, not of whole blocks, or writes to a read-only device. ``errors`` counts
    them as well, and no other number does.

    As a dictionary it is the server's whole answer, from JSON: ``stats["errors"]`` is
    ``stats.errors``.
    """

    refused: int
    kinds: Mapping[str, KindStats]
    queues: tuple[QueueStats, ...]
    lazy: tuple[LazyStats, ...] = ()

    @classmethod
    def parse(cls, stats: Mapping[str, Any]) -> ServerStats:
        """Parse a ``stats`` reply. Raises BtrfsUblkError when no server of this version
        sends it."""
        if isinstance(stats, ServerStats):
            return stats
        try:
            parsed = cls(
                **_counts(stats),
                refused=int(stats["refused"]),
                kinds={
                    str(name): KindStats(**_counts(kind), latency=_latencies(kind))
                    for name, kind in stats["kinds"].items()
                },
                queues=tuple(
                    QueueStats(int(queue["in_flight"]), int(queue["max_in_flight"]))
                    for queue in stats["queues"]
                ),
                lazy=tuple(_lazy(about) for about in stats.get("lazy", ())),
            )
            parsed.update(stats)
            return parsed
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BtrfsUblkError(
                f"the server's statistics are not understood: {error!r}",
                hint="build package and helpers from one version",
            ) from error


def _counts(stats: Mapping[str, Any]) -> dict[str, int]:
    return {item.name: int(stats[item.name]) for item in fields(Counts)}


def _lazy(about: Mapping[str, Any]) -> LazyStats:
    fetcher = about["fetcher"]
    parsed = {"failures", "hosts", "fetches", "disk_errors", "process"}
    return LazyStats(
        map=str(about["map"]),
        cache_directory=about["cache_directory"],
        mappings=int(about["mappings"]),
        fetcher=FetcherStats(
            failures={str(why): int(n) for why, n in fetcher["failures"].items()},
            hosts=dict(fetcher["hosts"]),
            disk_errors=dict(fetcher.get("disk_errors", {})),  # older servers lack some
            process=dict(fetcher.get("process", {})),
            fetches=tuple(
                FetchLatency(str(one["kind"]), str(one["host"]), _latency(one))
                for one in fetcher["latencies"]
            ),
            **{
                item.name: int(fetcher[item.name])
                for item in fields(FetcherStats)
                if item.name not in parsed and item.name in fetcher
            },
        ),
        cache=about.get("cache"),
        prefetch=Prefetch.parse(about["prefetch"]),
        complete=Completion.parse(about.get("complete")),
    )


def _latencies(kind: Mapping[str, Any]) -> Latencies:
    return Latencies(
        **{group: _latency(latency) for group, latency in kind["latency"].items()}
    )


def _latency(found: Mapping[str, Any]) -> Latency:
    return Latency(
        sum_ns=int(found["sum_ns"]),
        max_ns=int(found["max_ns"]),
        buckets=tuple((int(bound), int(n)) for bound, n in found["buckets"]),
    )
