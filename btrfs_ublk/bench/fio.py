"""Running fio: what it measured, and who used the CPUs meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from btrfs_ublk.base.process import Argument, Child, describe_exit, run, spawn
from btrfs_ublk.bench.cpu import RawSnapshot, Usage, children_of
from btrfs_ublk.bench.workloads import parse_workload
from btrfs_ublk.errors import BtrfsUblkError, CommandError

_START_TIMEOUT_S = 60.0
_POLL_S = 0.02
_END_TIMEOUT_S = 120.0
#: The time left at the second snapshot: fio must still be reading at both.
_TAIL_SHARE, _LEAST_TAIL_S = 0.05, 0.1
_QUANTILES = {
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p99.9": 0.999,
    "p99.99": 0.9999,
}


def _wait_for_jobs(fio: Child, count: int) -> set[int]:
    """Return the reading processes as soon as all exist; none if fio has ended."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while len(found := children_of(fio.pid)) < count:
        if time.monotonic() > deadline_s:
            raise CommandError(fio.failure(f"did not start {count} jobs"))
        # The kernel reports no event for a child's children.
        if fio.wait(_POLL_S) is not None:
            return set()
    return found


@dataclass(frozen=True)
class Outcome:
    """The sum of all jobs; ``latency_us`` are completion latencies by quantile."""

    job_iops: tuple[float, ...]
    latency_us: Mapping[str, float]

    @property
    def total_iops(self) -> float:
        return sum(self.job_iops)


def parse_output(text: str, *, direction: Literal["read", "write"] = "read") -> Outcome:
    """Parse fio's json+. Raises BtrfsUblkError for other text, for errors that fio met,
    and when it has read (written) nothing.
    """
    try:
        # Warnings may precede it.
        document = json.loads(text[text.index("{") :])
        jobs: list[dict[str, Any]] = document["jobs"]
        reads = [job[direction] for job in jobs]
        errors = {job["error"] for job in jobs} - {0}
        bins = [read["clat_ns"].get("bins", {}) for read in reads]
        count = sum(read["total_ios"] for read in reads)
        iops = tuple(float(read["iops"]) for read in reads)
    except (ValueError, LookupError, TypeError) as error:
        raise BtrfsUblkError(
            f"fio printed what is not its JSON: {text[:200]!r}"
        ) from error
    if errors:
        raise BtrfsUblkError(f"fio met errors: {sorted(errors)}")
    if not count:
        done = {"read": "read", "write": "written"}[direction]
        raise BtrfsUblkError(f"fio has {done} nothing", hint="give it more time")
    return Outcome(
        job_iops=iops,
        latency_us={
            name: nanoseconds / 1e3
            for name, nanoseconds in histogram_quantiles(
                merged(bins), _QUANTILES
            ).items()
        },
    )


def random_reads(
    path: Path,
    *,
    size_bytes: int,
    depth: int,
    runtime_s: float,
    output: Path,
    ramp_s: float = 0.0,
    more: Sequence[str] = (),
) -> Outcome:
    """Read 4 KiB anywhere in a device with io_uring, past the page cache."""
    argv = parse_workload(f"randread-uring-d{depth}").argv(
        path,
        size_bytes=size_bytes,
        direct=True,
        ramp_s=ramp_s,
        runtime_s=runtime_s,
        output=output,
    )
    run([*argv, *more], timeout_s=_END_TIMEOUT_S + runtime_s)
    return parse_output(output.read_text())


def merged(histograms: Iterable[Mapping[str, int]]) -> dict[int, int]:
    """Return the sum of histograms: how often each value occurred."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for value, count in histogram.items():
            total[int(value)] = total.get(int(value), 0) + count
    return total


def histogram_quantiles(
    histogram: Mapping[int, int], shares: Mapping[str, float]
) -> dict[str, float]:
    """Return, for each share, the least value that this share of a histogram does not
    exceed, and the "max". Empty for an empty histogram.
    """
    found: dict[str, float] = {}
    ordered = sorted(value for value, count in histogram.items() if count)
    if not ordered:
        return found
    total, seen = sum(histogram.values()), 0
    wanted = sorted(shares.items(), key=lambda item: item[1])
    for value in ordered:
        seen += histogram[value]
        # The product may have a rounding error.
        while wanted and seen >= round(wanted[0][1] * total, 6):
            found[wanted.pop(0)[0]] = float(value)
    return found | {"max": float(ordered[-1])}


def run_watched(
    argv: Sequence[Argument],
    *,
    jobs: int,
    ramp_s: float,
    runtime_s: float,
    server_pids: Iterable[int],
) -> Usage | None:
    """Run fio (Workload.argv()) to its end. Returns None when it ended too soon to
    measure its CPU use, as after a slow start. Raises CommandError when fio fails.
    """
    with spawn(argv) as fio:
        readers = _wait_for_jobs(fio, jobs)
        began_s = time.monotonic()
        fio.wait(ramp_s)
        before = RawSnapshot.take()
        tail_s = max(_LEAST_TAIL_S, _TAIL_SHARE * runtime_s)
        end_s = began_s + ramp_s + runtime_s - tail_s
        fio.wait(max(0.0, end_s - time.monotonic()))
        after = RawSnapshot.take()
        was_reading = fio.wait(0) is None and bool(readers)
        _finish(fio, timeout_s=_END_TIMEOUT_S + runtime_s)
    if not was_reading:
        return None
    parts = {"fio": {fio.pid, *readers}, "server": server_pids}
    return Usage(before.parse(), after.parse(), parts)


def _finish(fio: Child, *, timeout_s: float) -> None:
    if fio.wait(timeout_s) is None:
        raise CommandError(fio.failure("does not end"))
    if fio.returncode:
        raise CommandError(fio.failure(describe_exit(fio.returncode)))
