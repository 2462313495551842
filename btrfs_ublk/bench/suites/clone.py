"""A million files made as clones of one file, by one process and by several: does the
kernel's lock of that file, or its one extent, stand in the way?
"""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.bench.contests.cloning import cloning, workload_name
from btrfs_ublk.bench.scale import Amounts, Cost, Quantity, Scaling
from btrfs_ublk.bench.suite import Comparison, Suite

_CLONES = "clones"
#: Of each of five: metadata; making, syncing, unmounting.
_CLONE_BYTES, _CLONE_S = 1000, 5 * 100e-6


def _cost(amounts: Amounts) -> Cost:
    return Cost(amounts[_CLONES] * _CLONE_BYTES, amounts[_CLONES] * _CLONE_S)


def _comparisons(amounts: Amounts) -> Sequence[Comparison]:
    clones = int(amounts[_CLONES])
    contest = cloning(clones)
    names = [each.name for each in contest.contestants]
    workload = workload_name(clones)
    return [Comparison("making clones", names, [workload], contest=contest)]


SUITE = Suite(
    "a million clones of 4 EiB of virtual data, by 1, 2 and 4 processes",
    _comparisons,
    scaling=Scaling([Quantity(_CLONES, 1_000_000, 1000)], _cost),
)
