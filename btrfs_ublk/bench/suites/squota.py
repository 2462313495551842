"""Simple quotas: files, snapshots of them, and a write to each, as in the table of the
kernel's patches.
"""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.bench.contests.quotas import FILES, QUOTAS, SNAPSHOTS, workload_name
from btrfs_ublk.bench.published.squota import PUBLISHED
from btrfs_ublk.bench.scale import Amounts, Cost, Quantity, Scaling
from btrfs_ublk.bench.suite import Comparison, Suite
from btrfs_ublk.units import KIB

_SNAPSHOTS = "snapshots"
#: Measured on tmpfs: of a snapshot, and of a file in it; by all three together.
_SNAPSHOT_S, _WRITE_S = 0.01, 0.0006
_SNAPSHOT_BYTES, _WRITE_BYTES = 128 * KIB, 8 * KIB


def _sizes(amounts: Amounts) -> list[tuple[int, int]]:
    most = amounts[_SNAPSHOTS]
    return [(k, count) for k in FILES for count in SNAPSHOTS if count <= most]


def _cost(amounts: Amounts) -> Cost:
    sizes = _sizes(amounts)
    # One file system at a time.
    memory_bytes = max(n * (_SNAPSHOT_BYTES + k * _WRITE_BYTES) for k, n in sizes)
    return Cost(memory_bytes, sum(n * (_SNAPSHOT_S + k * _WRITE_S) for k, n in sizes))


def _comparisons(amounts: Amounts) -> Sequence[Comparison]:
    workloads = [workload_name(*size) for size in _sizes(amounts)]
    return [
        Comparison(
            "a write to each file of each snapshot",
            ["none", "qgroup", "squota"],
            workloads,
            contest=QUOTAS,
        )
    ]


SUITE = Suite(
    "btrfs' accounting with many snapshots: none, qgroups, simple quotas",
    _comparisons,
    scaling=Scaling([Quantity(_SNAPSHOTS, max(SNAPSHOTS), 10)], _cost),
    published=PUBLISHED,
)
