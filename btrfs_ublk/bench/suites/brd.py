"""A clone of generated data, and btrfs on a RAM disk, in a VM with two CPUs."""

from __future__ import annotations

from btrfs_ublk.bench.suite import Bar, Comparison, Suite

_PSYNC, _URING = "randread-psync", "randread-uring-d64"

SUITE = Suite(
    "a clone through ublk, and btrfs on brd with and without checksums",
    [
        Comparison(
            "one reader of a file on btrfs",
            ["btrfs-brd", "btrfs-brd-nodatasum", "ublk-clone"],
            [_PSYNC, _URING],
            [Bar("ublk-clone", _PSYNC, 0.72), Bar("ublk-clone", _URING, 1.23)],
        )
    ],
)
