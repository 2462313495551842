"""One turn: fio reads from a peer, and it is noted who uses the CPUs meanwhile."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from btrfs_ublk.bench.cpu import RawSnapshot, Usage
from btrfs_ublk.bench.fio import parse_output, wait_for_jobs
from btrfs_ublk.bench.peer import Subject
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.stamps import check_content
from btrfs_ublk.bench.workloads import Workload
from btrfs_ublk.errors import CommandError
from btrfs_ublk.process import Child, describe_exit, spawn
from btrfs_ublk.readers import read_buffered, read_direct

_END_TIMEOUT_S = 120.0
#: Read before the measured time begins, and the share of that time at its end in which
#: nobody looks at the CPUs any more, as fio may end a little sooner than is seen here.
_RAMP_SHARE, _LEAST_RAMP_S = 0.1, 0.2
_TAIL_SHARE, _LEAST_TAIL_S = 0.05, 0.1
_SAMPLES = 16


def measure(
    subject: Subject,
    workload: Workload,
    *,
    size_bytes: int,
    runtime_s: float,
    output: Path,
    chances: random.Random,
) -> Result:
    """What was measured; all CPU times are microseconds per I/O.

    Random blocks are checked before and after. Raises BtrfsUblkError for wrong data,
    and where fio fails.
    """
    direct = subject.direct and not workload.is_mapped

    def check() -> None:
        check_content(
            subject.path,
            subject.content,
            size_bytes,
            read=read_direct if direct else read_buffered,
            samples=_SAMPLES,
            chances=chances,
        )

    ramp_s = max(_LEAST_RAMP_S, _RAMP_SHARE * runtime_s)
    argv = workload.argv(
        subject.path,
        size_bytes=size_bytes,
        direct=direct,
        ramp_s=ramp_s,
        runtime_s=runtime_s,
        output=output,
    )
    check()
    load = os.getloadavg()[0]
    with spawn(argv) as fio:
        usage = _watch(fio, subject, workload.jobs, ramp_s, runtime_s)
        if fio.wait(_END_TIMEOUT_S + runtime_s) is None:
            raise CommandError(fio.failure("does not end"))
        if fio.returncode:
            raise CommandError(fio.failure(describe_exit(fio.returncode)))
    outcome = parse_output(output.read_text())
    check()
    iops = outcome.total_iops
    return {
        "iops": iops,
        "bytes_per_s": iops * workload.block_bytes,
        "p50_us": outcome.latency_us["p50"],
        "p99_us": outcome.latency_us["p99"],
        "load": load,
        **(cpu_record(usage, iops) if usage else {}),
    }


def cpu_record(usage: Usage, iops: float) -> Result:
    """Per I/O, the parts are the reader, the servers, and the kernel on behalf of
    nobody (its threads, interrupts); cores are theirs together, and those of others.
    """
    cores = usage.record()
    parts = {"fio": cores["fio"], "server": cores["server"]}
    parts["kernel"] = max(0.0, cores["rest"] - cores["other"])
    return {
        **{f"{name}_us": used * 1e6 / iops for name, used in parts.items()},
        "cpu_us": sum(parts.values()) * 1e6 / iops,
        "cores": sum(parts.values()),
        "other_cores": cores["other"],
    }


def _watch(
    fio: Child, subject: Subject, jobs: int, ramp_s: float, runtime_s: float
) -> Usage | None:
    """Who uses the CPUs while fio measures; None if it has ended too soon to tell."""
    readers = wait_for_jobs(fio, jobs)
    began_s = time.monotonic()
    fio.wait(ramp_s)
    before = RawSnapshot.take()
    tail_s = max(_LEAST_TAIL_S, _TAIL_SHARE * runtime_s)
    fio.wait(max(0.0, began_s + ramp_s + runtime_s - tail_s - time.monotonic()))
    after = RawSnapshot.take()
    if fio.wait(0) is not None or not readers:
        return None
    parts = {"fio": {fio.pid, *readers}, "server": set(subject.server_pids)}
    return Usage(before.parse(), after.parse(), parts)
