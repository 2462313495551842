"""fio: whether it is there and new enough, how it is called, what it has measured."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from btrfs_ublk.bench.cpu import children_of
from btrfs_ublk.capabilities import Program
from btrfs_ublk.errors import BtrfsUblkError, CommandError
from btrfs_ublk.process import Child, run

_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 60.0
_POLL_S = 0.02
_PROGRAM = Program("fio", "fio")
#: io_uring came with 3.13, which has all else that is used here.
_OLDEST = (3, 13)
_QUANTILES = {
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p99.9": 0.999,
    "p99.99": 0.9999,
}


@lru_cache  # in a matrix, each run asks
def _version_and_engines(_path: str | None) -> tuple[str, Sequence[str]]:
    """ "fio-3.33" and what it can do. Raises CommandError."""
    version = run(["fio", "--version"], timeout_s=_TIMEOUT_S).stdout.strip()
    return version, run(["fio", "--enghelp"], timeout_s=_TIMEOUT_S).stdout.split()


@dataclass(frozen=True)
class Fio:
    """fio, with an engine."""

    engine: str

    name: ClassVar[str] = "fio"

    @property
    def cure(self) -> str:
        return f"install fio {'.'.join(map(str, _OLDEST))} or newer, with {self.engine}"

    def probe(self) -> str | None:
        missing = _PROGRAM.probe()
        if missing is not None:
            return missing
        try:
            version, engines = _version_and_engines(shutil.which("fio"))
        except CommandError as error:
            return error.message
        found = re.match(r"fio-(\d+)\.(\d+)", version)
        if found is None or tuple(map(int, found.groups())) < _OLDEST:
            return f"{version or 'what calls itself fio'} is too old"
        if self.engine not in engines:
            return f"{version} was built without the engine {self.engine}"
        return None


def random_read_argv(
    path: Path,
    *,
    size_bytes: int,
    engine: str,
    depth: int,
    direct: bool,
    jobs: int,
    ramp_s: float,
    runtime_s: float,
    output: Path,
) -> list[str | Path]:
    """4 KiB reads anywhere in a file, by ``jobs`` processes, for a time. What is done
    during ``ramp_s`` is left out of the results, which go to ``output``.
    """
    return [
        *("fio", "--name=read", f"--filename={path}", "--readonly"),
        *("--rw=randread", "--bs=4k", "--norandommap", f"--size={size_bytes}"),
        *(f"--ioengine={engine}", f"--iodepth={depth}", f"--direct={int(direct)}"),
        *(f"--numjobs={jobs}", "--time_based", f"--ramp_time={ramp_s * 1e3:.0f}ms"),
        *(f"--runtime={runtime_s * 1e3:.0f}ms", "--output-format=json+"),
        *(f"--output={output}", "--eta=never"),
    ]


def wait_for_jobs(fio: Child, count: int) -> set[int]:
    """The processes that read, as soon as all are there; none if fio has ended."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while len(found := children_of(fio.pid)) < count:
        if time.monotonic() > deadline_s:
            raise CommandError(fio.failure(f"did not start {count} jobs"))
        # Nothing tells of the children of a child.
        if fio.wait(_POLL_S) is not None:
            return set()
    return found


@dataclass(frozen=True)
class Outcome:
    """Of all jobs together; ``latency_us`` are completion latencies by quantile."""

    job_iops: tuple[float, ...]
    latency_us: Mapping[str, float]
    context_switches_per_io: float

    @property
    def total_iops(self) -> float:
        return sum(self.job_iops)


def parse_output(text: str, *, direction: Literal["read", "write"] = "read") -> Outcome:
    """What fio printed as json+. Raises BtrfsUblkError for anything else, for errors
    that it met, and when it has read (written) nothing.
    """
    try:
        # Warnings may come before.
        document = json.loads(text[text.index("{") :])
        jobs: list[dict[str, Any]] = document["jobs"]
        reads = [job[direction] for job in jobs]
        errors = {job["error"] for job in jobs} - {0}
        bins = [read["clat_ns"].get("bins", {}) for read in reads]
        switches = sum(job["ctx"] for job in jobs)
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
        context_switches_per_io=switches / count,
    )


def merged(histograms: Iterable[Mapping[str, int]]) -> dict[int, int]:
    """The sum of histograms: how often each value occurred."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for value, count in histogram.items():
            total[int(value)] = total.get(int(value), 0) + count
    return total


def histogram_quantiles(
    histogram: Mapping[int, int], shares: Mapping[str, float]
) -> dict[str, float]:
    """The least value of a histogram that a share of all do not exceed, for each share;
    and the "max". Empty for an empty one.
    """
    found: dict[str, float] = {}
    ordered = sorted(value for value, count in histogram.items() if count)
    if not ordered:
        return found
    total, seen = sum(histogram.values()), 0
    wanted = sorted(shares.items(), key=lambda item: item[1])
    for value in ordered:
        seen += histogram[value]
        # The product may be off by a bit.
        while wanted and seen >= round(wanted[0][1] * total, 6):
            found[wanted.pop(0)[0]] = float(value)
    return found | {"max": float(ordered[-1])}
