"""composefs' authors, 2023."""

from __future__ import annotations

from btrfs_ublk.bench.contests.listing import WORKLOAD
from btrfs_ublk.bench.figures import Figure, Published

#: What they called it, where, ours, cold and warm milliseconds, peak megabytes.
_ROWS = (
    ("xfs", "", "xfs", 1449, 442, 54),
    ("erofs", "", "erofs-loop", 700, 391, 45),
    ("erofs dio", "", "erofs-loop-direct", 939, 400, 45),
    ("ovl", "", "overlay-erofs", 1827, 530, 130),
    ("ovl dio", "", "overlay-erofs-direct", 2156, 531, 130),
    ("cfs", "", "composefs", 689, 389, 51),
    ("ext4", "in a VM", "ext4", 1135, 394, 54),
    ("erofs", "in a VM", "erofs-loop", 715, 401, 46),
    ("ovl", "in a VM", "overlay-erofs", 1412, 515, 148),
    ("ovl lazy", "in a VM", None, 1063, 523, 87),
    ("cfs", "in a VM", "composefs", 719, 463, 51),
)
_MB_PER_MIB = 1.048576

PUBLISHED = Published(
    "the composefs patches (2023): a CentOS 9 tree of 51,010 files",
    "a machine that is not described; xfs on its disk, ext4 in a VM",
    "Theirs was read from a disk with all caches dropped; ours is mounted anew, on "
    "tmpfs, so cold means that only the image is in memory. Their overlayfs is that of "
    "composefs' layout: metadata in EROFS, contents elsewhere; ours has all in EROFS.",
    [
        Figure(WORKLOAD, theirs, ours, measure, round(value, 1), setting)
        for theirs, setting, ours, cold, warm, peak in _ROWS
        for measure, value in (
            ("cold_ms", cold),
            ("warm_ms", warm),
            ("peak_mib", peak / _MB_PER_MIB),
        )
    ],
)
