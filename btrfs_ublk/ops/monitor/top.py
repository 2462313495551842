"""A table of all running devices: what each has done since the last sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from btrfs_ublk.ops.monitor.samples import Sample, take_samples
from btrfs_ublk.server import ServerStats
from btrfs_ublk.server.stats import Latency
from btrfs_ublk.units import format_size

_NONE = "-"
_MS = 1e6
_UNBOUNDED = 10_000


@dataclass(frozen=True)
class Row:
    """One device over an interval. Rates are per second; ``p99_ms`` is of reads, NaN if
    none was timed. Values about fetching are None for devices that fetch nothing.
    """

    name: str
    health: str
    iops: float = math.nan
    bytes_per_s: float = math.nan
    p99_ms: float = math.nan
    in_flight: int = 0
    errors: int = 0
    fetched_per_s: float | None = None
    waiting: int | None = None
    failures: int | None = None
    cached_bytes: int | None = None
    hosts_open: int | None = None
    prefetch_percent: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON, with None for NaN."""
        values = asdict(self).items()
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in values
        }


def row_of(sample: Sample, before: Sample | None) -> Row:
    """Compare samples; no rates without ``before``, or if its server was another."""
    stats, name, health = sample.stats, sample.device.name, sample.device.health
    if stats is None:
        return Row(name, health)
    lazy = stats.lazy
    now = Row(
        name,
        health,
        in_flight=sum(queue.in_flight for queue in stats.queues),
        errors=stats.errors,
        waiting=sum(one.fetcher.reads_waiting for one in lazy) if lazy else None,
        failures=(
            sum(sum(one.fetcher.failures.values()) for one in lazy) if lazy else None
        ),
        cached_bytes=_cached_bytes(stats),
        hosts_open=(
            sum(
                bool(host["open"])
                for one in lazy
                for host in one.fetcher.hosts.values()
            )
            if lazy
            else None
        ),
        prefetch_percent=_prefetch_percent(stats),
    )
    earlier = before.stats if before is not None else None
    if before is None or earlier is None or not _is_same_server(sample, before):
        return now
    span_s = max(sample.taken_s - before.taken_s, 1e-3)
    fetched = _fetched_bytes(stats) - _fetched_bytes(earlier)
    latency = Latency()
    for kind, counts in stats.kinds.items():
        reads = counts.latency.reads
        if kind in earlier.kinds:
            reads = reads.since(earlier.kinds[kind].latency.reads)
        latency += reads
    return replace(
        now,
        iops=(stats.reads + stats.writes - earlier.reads - earlier.writes) / span_s,
        bytes_per_s=(
            stats.read_bytes
            + stats.write_bytes
            - earlier.read_bytes
            - earlier.write_bytes
        )
        / span_s,
        p99_ms=latency.percentile_ns(99) / _MS,
        fetched_per_s=fetched / span_s if lazy else None,
    )


def _is_same_server(sample: Sample, before: Sample) -> bool:
    """NB: the state is read before the server is asked. If that server dies in between,
    the statistics are its successor's.
    """
    assert sample.stats is not None and before.stats is not None
    if sample.device.state.server != before.device.state.server:
        return False
    return sample.stats.reads >= before.stats.reads


def _fetched_bytes(stats: ServerStats) -> int:
    return sum(one.fetcher.bytes_fetched for one in stats.lazy)


def _cached_bytes(stats: ServerStats) -> int | None:
    """Return the size of its caches; two maps may share one."""
    found = {
        one.cache_directory: int(one.cache["bytes"])
        for one in stats.lazy
        if one.cache is not None
    }
    return sum(found.values()) if found else None


def _prefetch_percent(stats: ServerStats) -> float | None:
    """Return the least progress of running prefetches; None if none runs."""
    running = [
        one.prefetch for one in stats.lazy if one.prefetch and one.prefetch.is_running
    ]
    return min((one.percent for one in running), default=None)


def rows(*, interval_s: float) -> Iterator[list[Row]]:
    """Yield rows of all devices at once and then every ``interval_s``."""
    before: dict[str, Sample] = {}
    while True:
        samples = take_samples()
        yield [row_of(one, before.get(one.device.name)) for one in samples]
        before = {one.device.name: one for one in samples}
        time.sleep(interval_s)


def table_of(found: list[Row], *, console: Console) -> Table:
    """Make a table for a console of any width: columns that do not fit are left out,
    names and values are never cut.
    """
    left_out: list[str] = []
    table = _table(found, left_out)
    for title in _DISPENSABLE:
        if _width_of(table, console) <= console.width:
            break
        left_out.append(title)
        table = _table(found, left_out)
    return table


def _width_of(table: Table, console: Console) -> int:
    unbounded = console.options.update(width=_UNBOUNDED)
    return Measurement.get(console, unbounded, table).maximum


def _table(found: list[Row], left_out: Collection[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = [column for column in _COLUMNS if column.title not in left_out]
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.is_text else "right"
        table.add_column(column.title, justify=justify, overflow="fold")
    for row in found:
        table.add_row(*(column.text_of(row) for column in columns))
    return table


@dataclass(frozen=True)
class _Column:
    title: str
    text_of: Callable[[Row], str]
    is_text: bool = False


def _health(row: Row) -> str:
    health = escape(row.health)
    return health if row.health == "serving" else f"[red]{health}[/red]"


_COLUMNS = (
    _Column("device", lambda row: escape(row.name), is_text=True),
    _Column("health", _health, is_text=True),
    _Column("I/O per s", lambda row: _number(row.iops, "{:,.0f}")),
    _Column("bytes/s", lambda row: _size(row.bytes_per_s)),
    _Column("p99 ms", lambda row: _number(row.p99_ms, "{:.2f}")),
    _Column("in flight", lambda row: str(row.in_flight)),
    _Column("errors", lambda row: f"{row.errors:,}"),
    _Column("fetched/s", lambda row: _size(row.fetched_per_s)),
    _Column("waiting", lambda row: _count(row.waiting)),
    _Column("failures", lambda row: _count(row.failures)),
    _Column("cache", lambda row: _size(row.cached_bytes)),
    _Column("hosts off", lambda row: _count(row.hosts_open)),
    _Column("prefetch", lambda row: _percent(row.prefetch_percent)),
)
#: The order in which columns are left out.
_DISPENSABLE = (
    *("hosts off", "prefetch", "in flight", "waiting", "cache", "failures"),
    *("p99 ms", "fetched/s", "I/O per s", "bytes/s", "errors"),
)


def _number(value: float, form: str) -> str:
    return _NONE if math.isnan(value) else form.format(value)


def _size(value: float | None) -> str:
    if value is None or math.isnan(value):
        return _NONE
    return format_size(round(value))


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f} %"


def _count(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"
