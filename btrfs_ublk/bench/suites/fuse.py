"""The FUSE front end, on any kernel: a clone, and btrfs on loop and zram."""

from __future__ import annotations

from btrfs_ublk.bench.suite import Bar, Comparison, Suite

_PSYNC, _URING = "randread-psync", "randread-uring-d64"
_CLONE = "fuse-clone"

SUITE = Suite(
    "a clone through FUSE, and btrfs on loop and zram, which hold their data",
    [
        Comparison(
            "a file on btrfs",
            ["btrfs-loop-nodatasum", "btrfs-loop", "btrfs-zram", _CLONE],
            [_PSYNC, _URING, f"{_PSYNC}-j2", f"{_URING}-j2"],
            [Bar(_CLONE, _PSYNC, 0.9), Bar(_CLONE, _URING, 0.6)],
        ),
        Comparison("the device", ["loop", "loop-direct", "fuse"], [_PSYNC, _URING]),
    ],
)
