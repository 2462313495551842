"""The same server through ublk and through FUSE, in a VM."""

from __future__ import annotations

from btrfs_ublk.bench.suite import Bar, Comparison, Suite

_PSYNC, _URING = "randread-psync", "randread-uring-d64"

SUITE = Suite(
    "our two front ends with the same source",
    [
        Comparison(
            "a clone on a sprout",
            ["fuse-clone", "ublk-clone"],
            [_PSYNC, _URING],
            [
                Bar("ublk-clone", _URING, 3.2),
                Bar("ublk-clone", _URING, 4.4, of="per_core"),
            ],
        ),
        Comparison("the device", ["fuse", "ublk"], [_PSYNC, _URING]),
    ],
)
