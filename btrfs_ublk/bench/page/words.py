"""What names of workloads mean, for people."""

from __future__ import annotations

import re

from btrfs_ublk.bench.workloads import Workload, parse_workload
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import format_size

_JOBS = re.compile(r"(.+?)-j([0-9]+)(-.+)?")
#: fio's names.
_PATTERNS = {
    "read": "sequential reads",
    "randread": "random reads",
    "write": "sequential writes",
    "randwrite": "random writes",
}


def workload_words(name: str) -> str:
    """ "4 KiB random reads, 64 in flight (io_uring), 2 jobs"; the name itself where it
    is not one of fio's.
    """
    try:
        workload: Workload = parse_workload(name)
    except UsageError:
        return name
    pattern = _PATTERNS.get(workload.pattern, workload.pattern)
    flight = "one at a time" if workload.depth == 1 else f"{workload.depth} in flight"
    jobs = f", {workload.jobs} jobs" if workload.jobs > 1 else ""
    size = format_size(workload.block_bytes)
    return f"{size} {pattern}, {flight} ({workload.engine}){jobs}"


def split_jobs(name: str) -> tuple[str, int]:
    """ "randread-psync-j2" is 2 jobs of "randread-psync", which by itself is one."""
    match = _JOBS.fullmatch(name)
    if match is None:
        return name, 1
    return match[1] + (match[3] or ""), int(match[2])
