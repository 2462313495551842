"""``ls -lR`` of a tree as large as a CentOS 9 image's, as composefs' authors did it."""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.bench.contests.listing import WORKLOAD, listing
from btrfs_ublk.bench.contests.trees import TreePlan
from btrfs_ublk.bench.published.ls_lr import PUBLISHED
from btrfs_ublk.bench.scale import Amounts, Cost, Quantity, Scaling
from btrfs_ublk.bench.suite import Comparison, Suite
from btrfs_ublk.units import KIB

_FILES, _DIRECTORIES, _LINKS = "files", "directories", "links"
#: Of each of eleven file systems: making it, mounting and listing it twice; what a
#: file, with its inode, takes in all images together.
_LIST_S, _FILE_BYTES = 11 * 30e-6, 5 * 10 * KIB


def _cost(amounts: Amounts) -> Cost:
    files = sum(amounts.values())
    return Cost(files * _FILE_BYTES, files * _LIST_S)


def _comparisons(amounts: Amounts) -> Sequence[Comparison]:
    plan = TreePlan(
        files=int(amounts[_FILES]),
        directories=int(amounts[_DIRECTORIES]),
        links=int(amounts[_LINKS]),
    )
    contest = listing(plan)
    names = [each.name for each in contest.contestants]
    return [Comparison("listing a tree", names, [WORKLOAD], contest=contest)]


SUITE = Suite(
    "ls -lR, cold and warm: xfs, ext4, btrfs, EROFS, overlayfs, composefs, clones",
    _comparisons,
    scaling=Scaling(
        [
            Quantity(_FILES, 51_010, 100),
            Quantity(_DIRECTORIES, 8_791, 20),
            Quantity(_LINKS, 4_445, 10),
        ],
        _cost,
    ),
    published=PUBLISHED,
)
