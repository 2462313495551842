"""What is in the local cache, and the same in a file segment; also with FUSE."""

from __future__ import annotations

from btrfs_ublk.bench.suite import Bar, Comparison, Suite

_PSYNC, _URING, _SEQUENTIAL = "randread-psync", "randread-uring-d64", "seqread-1m-psync"
_WORKLOADS = [_PSYNC, _URING, _SEQUENTIAL]


def _comparison(front_end: str) -> Comparison:
    cached = f"{front_end}-cached"
    return Comparison(
        f"the device, {front_end}",
        [f"{front_end}-file", cached],
        _WORKLOADS,
        [Bar(cached, workload, 0.95) for workload in _WORKLOADS],
    )


SUITE = Suite(
    "reads that the local cache answers, and reads of a file segment, both on tmpfs",
    [_comparison("ublk"), _comparison("fuse")],
    queues=1,
    depth=64,
)
