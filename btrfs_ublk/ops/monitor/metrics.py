"""The statistics of all devices as Prometheus metrics (docs/operation.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from btrfs_ublk.ops.monitor.samples import Sample, ask_snapshotter, take_samples
from btrfs_ublk.server.stats import Latency, LazyStats

PREFIX = "btrfs_ublk_"
_NS = 1_000_000_000
#: Upper bounds of the buckets, in seconds; they never depend on the data.
BUCKETS_S = tuple(
    factor * 10.0**exponent for exponent in range(-5, 2) for factor in (1, 2.5, 5)
)
_OPERATIONS = {
    "read": ("reads", "read_bytes"),
    "write": ("writes", "write_bytes"),
    "flush": ("flushes", None),
    "discard": ("discards", "discard_bytes"),
    "write_zeroes": ("write_zeroes", "write_zeroes_bytes"),
}
_Rows = tuple[tuple[str, str, str], ...]
_Labels = Mapping[str, str]
#: A fetcher's: the name in the statistics, the metric's name, its description.
_FETCHER_COUNTERS = (
    ("reads", "lazy_reads", "Reads that the cache did not answer"),
    ("read_errors", "lazy_read_errors", "Of those, reads that failed"),
    ("deadlines_missed", "lazy_deadlines_missed", "Reads that took too long"),
    ("attempts", "fetch_attempts", "Requests to mirrors"),
    ("retries", "fetch_retries", "Requests after the first one for a unit"),
    ("units_fetched", "fetched_units", "Units that came from mirrors"),
    ("bytes_fetched", "fetched_bytes", "Bytes that came from mirrors"),
    (
        "coded_bytes_fetched",
        "fetched_compressed_bytes",
        "Of compressed objects, bytes as they came",
    ),
    ("units_prefetched", "prefetched_units", "Units fetched before they were read"),
    ("units_verified", "verified_units", "Units whose digest was as expected"),
    ("units_pinned", "pinned_units", "Units whose digest was pinned at first fetch"),
    (
        "units_from_cache",
        "fetcher_cached_units",
        "Units that workers found in the cache",
    ),
    ("units_stored", "stored_units", "Units that were put into the cache"),
    ("store_failures", "store_failures", "Units that could not be put into the cache"),
    ("store_drops", "store_drops", "Units that the cache was too slow to take"),
)
_FETCHER_GAUGES = (
    ("reads_waiting", "lazy_reads_waiting", "Reads that wait for units"),
    ("units_queued", "queued_units", "Units that wait for their turn"),
    ("units_in_flight", "in_flight_units", "Units that are being fetched"),
    ("buffer_bytes", "fetch_buffer_bytes", "Memory of units in flight"),
    ("unstored_bytes", "unstored_bytes", "Of that, units that wait for the cache"),
)
#: Of the process that asks servers, where there is one (FetcherStats.process).
_PROCESS_COUNTERS = (
    ("started", "fetch_process_starts", "How often the process was started"),
    ("died", "fetch_process_deaths", "How often it died or was killed"),
    ("failed", "fetch_process_failures", "How often it could not be started"),
)
_HOST_COUNTERS = (
    ("attempts", "host_attempts", "Requests to a host"),
    ("failures", "host_failures", "Of those, failed ones"),
    ("bytes", "host_bytes", "Bytes that came from it"),
    ("openings", "host_breaker_openings", "How often it was left alone for a while"),
)
_HOST_GAUGES = (
    ("in_flight", "host_in_flight", "Requests under way to a host"),
    ("open", "host_breaker_open", "1: it is left alone at the moment"),
)
#: The last prefetch's, if there was one.
_PREFETCH_GAUGES = (
    ("is_running", "prefetch_running", "1: a prefetch is under way"),
    ("percent", "prefetch_percent", "How much of the last prefetch is done"),
    ("units", "prefetch_units", "Units of the last prefetch"),
    ("failed_units", "prefetch_failed_units", "Of those, units that failed"),
)
#: The background completion's, if there is one.
_COMPLETE_COUNTERS = (
    ("failed_units", "complete_failed_units", "Units that it could not fetch"),
)
_COMPLETE_GAUGES = (
    ("is_done", "complete_done", "1: all that the map names is in the cache"),
    ("units", "complete_units", "Units that the map names"),
    ("done_units", "complete_done_units", "Of those, units in the cache"),
    ("bytes", "complete_bytes", "Bytes of the units that the map names"),
    ("done_bytes", "complete_done_bytes", "Of those, bytes in the cache"),
)
_CACHE_COUNTERS = (
    ("put_units", "cache_put_units", "Units put into the cache by this server"),
    ("put_bytes", "cache_put_bytes", "Bytes put into the cache by this server"),
    ("evicted_units", "cache_evicted_units", "Units that this server evicted"),
    ("evicted_bytes", "cache_evicted_bytes", "Bytes that this server evicted"),
    ("dropped_units", "cache_dropped_units", "Units that were wrong"),
    ("no_room", "cache_no_room", "Units that there was no room for"),
    ("failed", "cache_failures", "What the disk of the cache refused"),
)
_CACHE_GAUGES = (
    ("bytes", "cache_bytes", "Bytes in the cache, of all servers together"),
    ("max_bytes", "cache_max_bytes", "The cap on them; 0: none"),
    ("free_bytes", "cache_free_bytes", "Free on the file system of the cache"),
)
#: A device's, and those of a segment kind's operation.
_DEVICE_GAUGES = (
    ("is_up", "device_up", "1: its server has answered"),
    ("is_well", "device_serving", "1: as `btrfs-ublk device list` says"),
)
_RECOVERIES = (("recoveries", "device_recoveries", "How often a server was replaced"),)
_REFUSED = (
    ("refused", "refused", "Requests that failed before they were any segment's"),
)
_ERRORS = (("errors", "errors", "Requests that failed"),)
_QUEUE_GAUGES = (("in_flight", "queue_in_flight", "Requests that a queue holds"),)
_COUNTERS = (
    *(_RECOVERIES, _REFUSED, _ERRORS, _FETCHER_COUNTERS, _PROCESS_COUNTERS),
    *(_HOST_COUNTERS, _COMPLETE_COUNTERS, _CACHE_COUNTERS),
)


#: A sealed image's that containerd uses.
_IMAGE_GAUGES = {
    "is_up": "1: it is mounted",
    "ready_s": "How long it took until it could be read",
    "data_bytes": "Bytes of its data",
    "fetched_bytes": "Of those, bytes on this machine",
    "failed_reads": "Reads that failed since its server started",
}


class _Families:
    """Metrics by name, each made with its first value."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def _add(
        self, kind: type[Metric], name: str, about: str, labels: _Labels, *value: object
    ) -> None:
        if name not in self.made:
            self.made[name] = kind(  # type: ignore[call-arg]
                PREFIX + name, about, labels=list(labels)
            )
        self.made[name].add_metric(list(labels.values()), *value)

    def counter(self, name: str, about: str, value: float, **labels: str) -> None:
        self._add(CounterMetricFamily, name, about, labels, value)

    def gauge(self, name: str, about: str, value: float, **labels: str) -> None:
        self._add(GaugeMetricFamily, name, about, labels, value)

    def histogram(self, name: str, about: str, latency: Latency, **labels: str) -> None:
        value = buckets_of(latency), latency.sum_ns / _NS
        self._add(HistogramMetricFamily, name, about, labels, *value)

    def table(self, rows: _Rows, values: Any, **labels: str) -> None:
        """Add what a table names of a dictionary, or of an object's attributes."""
        add = self.counter if rows in _COUNTERS else self.gauge
        for key, name, about in rows:
            given = isinstance(values, Mapping)
            value = values[key] if given else getattr(values, key)
            add(name, about, value, **labels)


def buckets_of(latency: Latency) -> Sequence[tuple[str, float]]:
    """Return cumulative counts at BUCKETS_S and infinity. A server's bucket that spans
    a bound counts above it, so that no duration looks shorter than it was.
    """
    counts = [
        sum(count for bound_ns, count in latency.buckets if bound_ns <= bound_s * _NS)
        for bound_s in BUCKETS_S
    ]
    made = [(f"{bound:g}", float(n)) for bound, n in zip(BUCKETS_S, counts)]
    return [*made, ("+Inf", float(latency.count))]


class DeviceCollector(Collector):
    """A collector that asks all servers at each scrape."""

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        for sample in take_samples():
            _add_sample(families, sample)
        _add_snapshotter(families)
        yield from families.made.values()

    def describe(self) -> Iterable[Metric]:
        """Describe nothing, as the metrics depend on the devices."""
        return []


def _add_snapshotter(families: _Families) -> None:
    status = ask_snapshotter()
    if status is None:
        return
    for reference, counts in status.layers.items():
        for kind, count in counts.items():
            families.gauge(
                "snapshotter_layers",
                "Layers of images that are lazy, or ordinary",
                count,
                reference=reference,
                kind=kind,
            )
    for reason, count in status.fallbacks.items():
        families.counter(
            "snapshotter_fallbacks",
            "Layers that could not arrive lazily",
            count,
            reason=reason,
        )
    for image in status.images:
        for key, about in _IMAGE_GAUGES.items():
            if image[key] is not None:
                name = f"snapshotter_{key.removesuffix('_s')}"
                name += "_seconds" * key.endswith("_s")
                families.gauge(
                    name, about, image[key], image=image["name"], device=image["volume"]
                )


def _add_sample(families: _Families, sample: Sample) -> None:
    name, stats = sample.device.name, sample.stats
    state = {"is_up": stats is not None, "is_well": sample.device.is_well}
    families.table(_DEVICE_GAUGES, state, device=name)
    families.table(_RECOVERIES, sample.device.state, device=name)
    if stats is None:
        return
    families.table(_REFUSED, stats, device=name)
    for kind, counts in stats.kinds.items():
        families.table(_ERRORS, counts, device=name, kind=kind)
        for operation, (name_of_count, size) in _OPERATIONS.items():
            labels = {"device": name, "kind": kind, "operation": operation}
            families.counter(
                "requests",
                "Requests answered",
                getattr(counts, name_of_count),
                **labels,
            )
            if size is not None:
                families.counter(
                    "bytes", "Bytes read or written", getattr(counts, size), **labels
                )
        for operation in ("read", "write", "flush"):
            latency: Latency = getattr(counts.latency, _OPERATIONS[operation][0])
            families.histogram(
                "request_seconds",
                "Durations of requests, of a sample where they need no waiting",
                latency,
                device=name,
                kind=kind,
                operation=operation,
            )
    for number, queue in enumerate(stats.queues):
        families.table(_QUEUE_GAUGES, queue, device=name, queue=str(number))
    for lazy in stats.lazy:
        _add_lazy(families, name, lazy)


def _add_lazy(families: _Families, device: str, lazy: LazyStats) -> None:
    labels = {"device": device, "map": lazy.map}
    fetcher = lazy.fetcher
    families.gauge("mappings", "Mappings of a map", lazy.mappings, **labels)
    families.table(_FETCHER_COUNTERS, fetcher, **labels)
    families.table(_FETCHER_GAUGES, fetcher, **labels)
    for reason, count in fetcher.failures.items():
        families.counter(
            "fetch_failures",
            "Requests to mirrors that failed",
            count,
            **labels,
            reason=reason,
        )
    for disk in ("map", "cache") if lazy.cache else ("map",):
        families.gauge(
            "disk_refuses",
            "1: the disk of the map, or of the cache, is full, or takes nothing",
            disk in fetcher.disk_errors,
            **labels,
            disk=disk,
        )
    if fetcher.process:
        _add_process(families, fetcher.process, labels)
    for host, counts in fetcher.hosts.items():
        families.table(_HOST_COUNTERS, counts, **labels, host=host)
        families.table(_HOST_GAUGES, counts, **labels, host=host)
    if lazy.prefetch is not None:
        families.table(_PREFETCH_GAUGES, lazy.prefetch, **labels)
    if lazy.complete is not None:
        families.table(_COMPLETE_GAUGES, lazy.complete, **labels)
        families.gauge(
            "complete_state",
            "1: the state of the background completion",
            1,
            **labels,
            state=lazy.complete.state,
        )
        families.table(_COMPLETE_COUNTERS, lazy.complete, **labels)
    for one in fetcher.fetches:
        families.histogram(
            "fetch_seconds",
            "Durations of requests to mirrors that gave what was asked for",
            one.latency,
            **labels,
            kind=one.kind,
            host=one.host,
        )
    if lazy.cache is None or lazy.cache_directory is None:
        return
    labels["cache"] = lazy.cache_directory
    families.table(_CACHE_COUNTERS, lazy.cache, **labels)
    families.table(_CACHE_GAUGES, lazy.cache, **labels)


def _add_process(
    families: _Families, process: Mapping[str, Any], labels: Mapping[str, str]
) -> None:
    families.table(_PROCESS_COUNTERS, process, **labels)
    families.gauge(
        "fetch_process_running",
        "1: a process that asks servers is there",
        process["running"],
        **labels,
    )
    for lacks in process["lacks"]:
        families.gauge(
            "fetch_process_lacks",
            "1: what this machine does not give the newest one",
            1,
            **labels,
            lacks=lacks,
        )


def device_registry() -> CollectorRegistry:
    """Make a registry of devices only, without metrics of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DeviceCollector())
    return registry


def metrics_text() -> str:
    """Return all metrics of all devices in Prometheus' text format."""
    return generate_latest(device_registry()).decode()
