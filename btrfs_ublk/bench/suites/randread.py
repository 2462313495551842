"""4 KiB random reads as in the README of 2023: btrfs on a RAM disk, and a clone whose
data a server makes up.
"""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.bench.published.randread import PUBLISHED
from btrfs_ublk.bench.published.randread import WORKLOADS as _WORKLOADS
from btrfs_ublk.bench.scale import Amounts, fio_scaling
from btrfs_ublk.bench.suite import Comparison, Suite
from btrfs_ublk.units import GIB

_PEERS = (
    *("btrfs-brd", "btrfs-brd-nodatasum", "btrfs-zram", "btrfs-loop"),
    *("ublk-clone", "fuse-clone", "tmpfs", "dev-zero", "disk"),
)
#: Those that have all they are read from in memory.
_IN_MEMORY = 5


def _comparisons(_: Amounts) -> Sequence[Comparison]:
    return [Comparison("one reader, and twelve", _PEERS, _WORKLOADS)]


SUITE = Suite(
    "4 KiB random reads of btrfs on RAM disks, of clones, of tmpfs and /dev/zero",
    _comparisons,
    scaling=fio_scaling(
        full_bytes=2 * GIB,
        full_s=10,
        copies=_IN_MEMORY,
        measurements=len(_PEERS) * len(_WORKLOADS),
    ),
    published=PUBLISHED,
)
