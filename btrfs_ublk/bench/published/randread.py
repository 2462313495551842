"""The README of the first btrfs-ublk, 2023."""

from __future__ import annotations

from btrfs_ublk.bench.figures import Figure, Published

_ONE_URING, _URING = "randread-uring-d16", "randread-uring-d16-j12"
_ONE_PSYNC, _PSYNC = "randread-psync", "randread-psync-j12"
WORKLOADS = (_ONE_URING, _URING, _ONE_PSYNC, _PSYNC)

#: btrfs on brd, btrfs-ublk: I/O per second.
_TABLE = {
    _ONE_URING: (175e3, 215e3),
    _URING: (680e3, 680e3),
    _ONE_PSYNC: (107e3, 77e3),
    _PSYNC: (420e3, 345e3),
}
_OTHERS = "how it was read is not told"

PUBLISHED = Published(
    "the README of btrfs-ublk (2023)",
    "Core i7-9750H, 12 threads, Linux 6.0.18",
    "Their server had a memset source; the depth of io_uring is not "
    "told, ours is 16.",
    [
        *(
            Figure(workload, peer, like, "iops", value)
            for workload, values in _TABLE.items()
            for peer, like, value in zip(
                ("btrfs on brd", "btrfs-ublk"), ("btrfs-brd", "ublk-clone"), values
            )
        ),
        Figure(_ONE_URING, "tmpfs", "tmpfs", "iops", 554e3, _OTHERS),
        Figure(_ONE_URING, "/dev/zero", "dev-zero", "iops", 1000e3, _OTHERS),
        Figure(_ONE_URING, "raw SSD", "disk", "iops", 410e3, _OTHERS),
        Figure(_ONE_URING, "EdenFS, warm", None, "iops", 68e3, _OTHERS),
        Figure(_URING, "EdenFS, warm, 18 readers", None, "iops", 195e3, _OTHERS),
    ],
)
