"""fio: its workloads, which have names ("randread-psync", "randread-uring-d64-j2",
"seqread-1m"), what it measured, and who used the CPUs meanwhile.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from btrfs_ublk.base.process import Child, describe_exit, run, spawn
from btrfs_ublk.bench.cpu import RawSnapshot, Usage, children_of
from btrfs_ublk.errors import BtrfsUblkError, CommandError, UsageError
from btrfs_ublk.units import KIB, MIB

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

_MOST = 256  # the most jobs, and the largest depth


@dataclass(frozen=True)
class Workload:
    """``jobs`` processes read, each with ``depth`` requests in flight."""

    name: str
    pattern: str
    block_bytes: int
    engine: str
    depth: int = 1
    jobs: int = 1

    @property
    def is_mapped(self) -> bool:
        """Whether it uses the page cache even if other workloads bypass it."""
        return self.engine == "mmap"

    def argv(
        self,
        path: Path,
        *,
        size_bytes: int,
        direct: bool,
        ramp_s: float,
        runtime_s: float,
        output: Path,
    ) -> list[str | Path]:
        """Return the argv of fio, which reads the first ``size_bytes`` for a time. What
        it does during ``ramp_s`` is left out of the results, which go to ``output``.
        """
        return [
            *("fio", "--name=job", f"--filename={path}", "--readonly"),
            *(f"--rw={self.pattern}", f"--bs={self.block_bytes}", "--norandommap"),
            *(f"--size={size_bytes}", f"--ioengine={self.engine}"),
            *(f"--iodepth={self.depth}", f"--numjobs={self.jobs}"),
            *(f"--direct={int(direct and not self.is_mapped)}", "--time_based"),
            *(
                f"--ramp_time={ramp_s * 1e3:.0f}ms",
                f"--runtime={runtime_s * 1e3:.0f}ms",
            ),
            *("--output-format=json+", f"--output={output}", "--eta=never"),
        ]


_PATTERNS = {"randread": "randread", "seqread": "read"}
_BLOCKS = {"4k": 4 * KIB, "1m": MIB}
_ENGINES = {"psync": "psync", "uring": "io_uring", "libaio": "libaio", "mmap": "mmap"}
#: Engines with several requests in flight, and their default depths.
_DEPTHS = {"uring": 16, "libaio": 16}
_NAME = re.compile(
    rf"({'|'.join(_PATTERNS)})(?:-({'|'.join(_BLOCKS)}))?(?:-({'|'.join(_ENGINES)}))?"
    r"(?:-d([0-9]{1,3}))?(?:-j([0-9]{1,3}))?"
)
NAMES = (
    f"{'|'.join(_PATTERNS)}[-{'|'.join(_BLOCKS)}]-{'|'.join(_ENGINES)}[-dN] "
    "(uring, libaio)"
)
HINT = f"known: {NAMES}; each with -jN for N jobs"


def parse_workload(name: str) -> Workload:
    """Parse a name. Raises UsageError for an invalid one."""
    match = _NAME.fullmatch(name)
    # Block size or engine must be given, so that no default is taken for the only way.
    if match is None or not (match[2] or match[3]):
        raise UsageError(f"there is no workload {name!r}", hint=HINT)
    pattern, block, engine = match[1], match[2] or "4k", match[3] or "psync"
    depth, jobs = int(match[4] or _DEPTHS.get(engine, 1)), int(match[5] or 1)
    if not (1 <= depth <= _MOST and 1 <= jobs <= _MOST):
        raise UsageError(f"workload {name!r}: depth and jobs are 1 to {_MOST}")
    if match[4] and engine not in _DEPTHS:
        raise UsageError(f"workload {name!r}: {engine} has no depth", hint=HINT)
    return Workload(
        name, _PATTERNS[pattern], _BLOCKS[block], _ENGINES[engine], depth, jobs
    )


@dataclass(frozen=True)
class Outcome:
    """The sum of all jobs; ``latency_us`` are completion latencies by quantile."""

    job_iops: tuple[float, ...]
    latency_us: Mapping[str, float]

    @property
    def total_iops(self) -> float:
        return sum(self.job_iops)


def parse_output(text: str) -> Outcome:
    """Parse fio's json+. Raises BtrfsUblkError for other text, for errors that fio met,
    and when it has read nothing.
    """
    try:
        # Warnings may precede it.
        document = json.loads(text[text.index("{") :])
        jobs: list[dict[str, Any]] = document["jobs"]
        reads = [job["read"] for job in jobs]
        errors = {job["error"] for job in jobs} - {0}
        bins = merged(read["clat_ns"].get("bins", {}) for read in reads)
        count = sum(read["total_ios"] for read in reads)
        iops = tuple(float(read["iops"]) for read in reads)
    except (ValueError, LookupError, TypeError) as error:
        raise BtrfsUblkError(
            f"fio printed what is not its JSON: {text[:200]!r}"
        ) from error
    if errors:
        raise BtrfsUblkError(f"fio met errors: {sorted(errors)}")
    if not count:
        raise BtrfsUblkError("fio has read nothing", hint="give it more time")
    latencies_ns = histogram_quantiles(bins, _QUANTILES)
    return Outcome(iops, {name: value / 1e3 for name, value in latencies_ns.items()})


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
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update({int(value): count for value, count in histogram.items()})
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


def run_fio(
    workload: Workload,
    path: Path,
    *,
    size_bytes: int,
    direct: bool,
    ramp_s: float,
    runtime_s: float,
    output: Path,
    server_pids: Iterable[int],
) -> tuple[Outcome, Usage | None]:
    """Run a workload to its end. There is no usage if it ended too soon to measure
    that, as after a slow start. Raises CommandError when fio fails, and what
    parse_output() raises.
    """
    argv = workload.argv(
        path,
        size_bytes=size_bytes,
        direct=direct,
        ramp_s=ramp_s,
        runtime_s=runtime_s,
        output=output,
    )
    with spawn(argv) as fio:
        readers = _wait_for_jobs(fio, workload.jobs)
        began_s = time.monotonic()
        fio.wait(ramp_s)
        before = RawSnapshot.take()
        tail_s = max(_LEAST_TAIL_S, _TAIL_SHARE * runtime_s)
        end_s = began_s + ramp_s + runtime_s - tail_s
        fio.wait(max(0.0, end_s - time.monotonic()))
        after = RawSnapshot.take()
        was_reading = fio.wait(0) is None and bool(readers)
        if fio.wait(_END_TIMEOUT_S + runtime_s) is None:
            raise CommandError(fio.failure("does not end"))
        if fio.returncode:
            raise CommandError(fio.failure(describe_exit(fio.returncode)))
    usage = None
    if was_reading:
        parts = {"fio": {fio.pid, *readers}, "server": server_pids}
        usage = Usage(before.parse(), after.parse(), parts)
    return parse_output(output.read_text()), usage


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
