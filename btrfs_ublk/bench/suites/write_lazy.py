"""4 KiB into a file of 1 GiB that is not here yet: copy-on-write of blocks, and of
whole files.
"""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.bench.contests.overwriting import OVERWRITING, WORKLOAD
from btrfs_ublk.bench.scale import SIZE, Amounts, Cost, Quantity, Scaling
from btrfs_ublk.bench.suite import Comparison, Suite
from btrfs_ublk.units import GIB, MIB

#: The source, EROFS of it, what is copied up, and two of btrfs.
_IN_MEMORY = 5
#: Copying it up; all else.
_BYTES_PER_S, _BESIDES_S = 0.5 * GIB, 1.0


def _cost(amounts: Amounts) -> Cost:
    size_bytes = amounts[SIZE]
    return Cost(_IN_MEMORY * size_bytes, size_bytes / _BYTES_PER_S + _BESIDES_S)


def _comparisons(_: Amounts) -> Sequence[Comparison]:
    names = [each.name for each in OVERWRITING.contestants]
    return [
        Comparison("the first write", names, [WORKLOAD], contest=OVERWRITING),
    ]


SUITE = Suite(
    "4 KiB written into a large lazy file: clones, overlayfs on EROFS and on btrfs",
    _comparisons,
    scaling=Scaling([Quantity(SIZE, GIB, 16 * MIB, "bytes")], _cost),
)
