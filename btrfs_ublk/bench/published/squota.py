"""The kernel patches of simple quotas, 2023."""

from __future__ import annotations

from btrfs_ublk.bench.contests.quotas import FILES, SNAPSHOTS, workload_name
from btrfs_ublk.bench.figures import Figure, Published

#: Wall seconds: by accounting, for each number of snapshots those of 1, 10, 100 files.
_SECONDS = {
    "none": [
        *((0.18, 0.28, 0.55), (0.24, 0.43, 0.99), (1.58, 2.80, 6.57)),
        *((16.5, 29.7, 65.1), (211, 325, 718)),
    ],
    "qgroup": [
        *((2.19, 0.34, 0.64), (0.35, 0.48, 0.80), (2.32, 3.24, 7.63)),
        *((25.8, 68.7, 216), (757, 3732, 14171)),
    ],
    "squota": [
        *((2.19, 0.31, 0.70), (0.32, 0.43, 0.90), (1.83, 2.86, 6.75)),
        *((19.2, 28.9, 67.9), (232, 351, 743)),
    ],
}

PUBLISHED = Published(
    "the cover letter of btrfs' simple quotas (2023)",
    "a machine that is not described, with a disk",
    "Ours is on a loop device on tmpfs, and times the snapshots and a sync as well.",
    [
        Figure(workload_name(files, snapshots), name, name, "seconds", seconds)
        for row, snapshots in enumerate(SNAPSHOTS)
        for column, files in enumerate(FILES)
        for name, rows in _SECONDS.items()
        for seconds in (rows[row][column],)
    ],
)
