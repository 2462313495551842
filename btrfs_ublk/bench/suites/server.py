"""The ublk server by itself; repeatable with ``scripts/vm --icount``."""

from __future__ import annotations

from btrfs_ublk.bench.suite import Bar, Comparison, Suite

_PSYNC, _URING = "randread-psync", "randread-uring-d64"

SUITE = Suite(
    "our ublk server and rublk, with the same queues; the limit is null_blk",
    [
        Comparison(
            "what answers from memory",
            ["rublk-null", "ublk", "null_blk"],
            [_PSYNC, _URING],
            [
                Bar("ublk", _PSYNC, 1.06),
                Bar("ublk", _URING, 1.01),
                Bar("ublk", _PSYNC, 1.0, of="per_core"),
                Bar("ublk", _URING, 1.0, of="per_core"),
            ],
        ),
        Comparison(
            "a file on tmpfs",
            ["rublk-loop", "ublk-file"],
            [_PSYNC, _URING],
            [Bar("ublk-file", _PSYNC, 1.1), Bar("ublk-file", _URING, 1.1)],
        ),
    ],
    queues=1,
    depth=64,
)
