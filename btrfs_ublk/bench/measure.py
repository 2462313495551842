"""One turn: fio reads from a peer, or writes to it, and it is noted who uses the CPUs
meanwhile.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from btrfs_ublk.bench.cpu import Usage
from btrfs_ublk.bench.fio import parse_output
from btrfs_ublk.bench.peer import Subject
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.stamps import check_content
from btrfs_ublk.bench.watched import run_watched
from btrfs_ublk.bench.workloads import WRITTEN_BLOCK, Workload
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.readers import read_buffered, read_direct

#: Read before the measured time begins, and the share of that time at its end in which
#: nobody looks at the CPUs any more, as fio may end a little sooner than is seen here.
_RAMP_SHARE, _LEAST_RAMP_S = 0.1, 0.2
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

    Random blocks are checked before and after; those of a writable subject may be what
    fio writes. Raises BtrfsUblkError for wrong data, and where fio fails.
    """
    if workload.writes and not subject.writable:
        raise ValueError(f"{subject.path} must not be written to")
    if workload.is_mapped and not subject.mappable:
        raise CapabilityError("it cannot be mapped into memory")
    direct = subject.direct and not workload.is_mapped

    def check() -> None:
        check_content(
            subject.path,
            subject.content,
            size_bytes,
            read=read_direct if direct else read_buffered,
            samples=_SAMPLES,
            chances=chances,
            or_else=WRITTEN_BLOCK if subject.writable else None,
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
    usage = run_watched(
        argv,
        jobs=workload.jobs,
        ramp_s=ramp_s,
        runtime_s=runtime_s,
        server_pids=subject.server_pids,
    )
    outcome = parse_output(
        output.read_text(), direction="write" if workload.writes else "read"
    )
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
    nobody (its threads, interrupts); cores are theirs together, those of others, and
    of all (the CPUs' own counters). "accounted" is what all processes and kernel
    threads have used, as a share of that: near 1, or a counter is wrong.
    """
    cores = usage.record()
    parts = {"fio": cores["fio"], "server": cores["server"]}
    parts["kernel"] = max(0.0, cores["rest"] - cores["other"])
    return {
        **{f"{name}_us": used * 1e6 / iops for name, used in parts.items()},
        "cpu_us": sum(parts.values()) * 1e6 / iops,
        "cores": sum(parts.values()),
        "other_cores": cores["other"],
        "total_cores": cores["total"],
        "accounted": cores["accounted"],
    }
