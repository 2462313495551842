"""A server's statistics: counts, latencies, queues (csrc/server/stats.h)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.lazy.prefetch import Prefetch


@dataclass(frozen=True)
class Latency:
    """A histogram of durations, in nanoseconds: from when the front end handed a
    request to the engine until its answer left.

    A bucket is (the longest that it holds, how many); it is at most 12.5 % wide. Of
    what a kind answers at once, the server times one round in four only.
    """

    sum_ns: int = 0
    max_ns: int = 0
    buckets: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """How many were timed."""
        return sum(count for _, count in self.buckets)

    @property
    def mean_ns(self) -> float:
        """NaN where nothing was timed."""
        return self.sum_ns / self.count if self.count else math.nan

    def percentile_ns(self, percent: float) -> float:
        """What that share does not exceed: up to 12.5 % more than the true value, never
        more than the longest. NaN where nothing was timed.
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percentile {percent} is not in (0, 100]")
        # NB: rounded, as 99.9 / 100 * 1000 is a little more than 999.
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
        """What came after ``before``, an earlier state of the same histogram. Its
        longest is a bound only: that of the uppermost bucket.
        """
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
    """Requests (parts, where one spans segments), bytes, and how many failed."""

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
    """By operation; discards and zeroes are writes."""

    reads: Latency = Latency()
    writes: Latency = Latency()
    flushes: Latency = Latency()


@dataclass(frozen=True)
class KindStats(Counts):
    """Of one segment kind."""

    latency: Latencies = Latencies()


@dataclass(frozen=True)
class QueueStats:
    """Of one thread of the front end: requests that it has and did not answer yet."""

    in_flight: int
    max_in_flight: int


@dataclass(frozen=True)
class FetchLatency:
    """Of requests to mirrors of one kind and host that gave what was asked for, until
    the last byte; ``host`` is empty for this machine's files.
    """

    kind: str
    host: str
    latency: Latency


@dataclass(frozen=True)
class FetcherStats:
    """Of what fetches the units of one map (csrc/lazy/fetcher.h).

    ``reads`` are those that the cache did not answer. A unit is ``verified`` against a
    digest that was known, or ``pinned`` when it was fetched for the first time.
    ``failures`` are of attempts, by reason; ``hosts`` has one object per host, with
    "attempts", "failures", "bytes", "in_flight", "openings" and "open" (of its circuit
    breaker). The last four numbers say what there is now.
    """

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


@dataclass(frozen=True)
class LazyStats:
    """Of one map, and of its cache (docs/cache.md)."""

    map: str
    cache_directory: str | None
    mappings: int
    fetcher: FetcherStats
    cache: Mapping[str, Any] | None
    prefetch: Prefetch | None = None


@dataclass(frozen=True)
class ServerStats(Counts):
    """All of a server: ``ServerStats.parse(server.stats())``.

    ``refused`` are requests that failed before they were any segment's: out of range,
    too long, not of whole blocks, or writes to a read-only device. ``errors`` has them
    as well; they are in no other number.
    """

    refused: int
    kinds: Mapping[str, KindStats]
    queues: tuple[QueueStats, ...]
    lazy: tuple[LazyStats, ...] = ()

    @classmethod
    def parse(cls, stats: Mapping[str, Any]) -> ServerStats:
        """Of a ``stats`` reply. Raises BtrfsUblkError when it is not what a server of
        this version sends.
        """
        try:
            return cls(
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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BtrfsUblkError(
                f"the server's statistics are not understood: {error!r}",
                hint="build package and helpers from one version",
            ) from error


def _counts(stats: Mapping[str, Any]) -> dict[str, int]:
    return {item.name: int(stats[item.name]) for item in fields(Counts)}


def _lazy(about: Mapping[str, Any]) -> LazyStats:
    fetcher = about["fetcher"]
    parsed = {"failures", "hosts", "fetches"}
    return LazyStats(
        map=str(about["map"]),
        cache_directory=about["cache_directory"],
        mappings=int(about["mappings"]),
        fetcher=FetcherStats(
            failures={str(why): int(n) for why, n in fetcher["failures"].items()},
            hosts=dict(fetcher["hosts"]),
            fetches=tuple(
                FetchLatency(str(one["kind"]), str(one["host"]), _latency(one))
                for one in fetcher["latencies"]
            ),
            **{
                item.name: int(fetcher[item.name])
                for item in fields(FetcherStats)
                if item.name not in parsed
            },
        ),
        cache=about.get("cache"),
        prefetch=Prefetch.parse(about["prefetch"]),
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
