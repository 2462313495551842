"""4 KiB random writes, each on its medium before it is done (O_DIRECT, O_SYNC), by more
and more threads: as ZUFS was held against FUSE. ZUFS is gone; what stands in for it has
its name from what it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.bench.published.syncwrite import PUBLISHED, THREADS, workload_name
from btrfs_ublk.bench.reading import WRITING
from btrfs_ublk.bench.scale import Amounts, fio_scaling
from btrfs_ublk.bench.suite import Comparison, Suite
from btrfs_ublk.units import GIB

_PEERS = (
    *("fuse-plain-file", "fuse-least", "fuse-least-io-uring", "fuse-least-passthrough"),
    *("fuse-file", "ublk-file", "loop", "brd", "null_blk", "dax-ext4", "tmpfs"),
)
_IN_MEMORY = 9


def _comparisons(_: Amounts) -> Sequence[Comparison]:
    workloads = [workload_name(count) for count in THREADS]
    return [Comparison("synchronous writes", _PEERS, workloads, contest=WRITING)]


SUITE = Suite(
    "4 KiB synchronous writes by 1 to 8 threads: FUSE four ways, block devices, DAX",
    _comparisons,
    scaling=fio_scaling(
        full_bytes=GIB,
        full_s=10,
        copies=_IN_MEMORY,
        measurements=len(_PEERS) * len(THREADS),
    ),
    published=PUBLISHED,
)
