"""The patches of virtiofs' DAX, 2020."""

from __future__ import annotations

from btrfs_ublk.bench.figures import Figure, Published
from btrfs_ublk.units import BLOCK_BYTES, MIB

_COLUMNS = (
    *("psync", "psync-j4", "mmap", "mmap-j4"),
    *("libaio-d16", "libaio-d16-j4"),
)
#: MiB per second without and with DAX; None for what they could not do.
_ROWS: dict[str, tuple[tuple[int | None, int], ...]] = {
    "seqread": (
        *((35, 643), (219, 2132), (None, 741), (None, 2530)),
        *((293, 425), (207, 1543)),
    ),
    "randread": (
        *((36, 572), (211, 1764), (None, 719), (None, 2005)),
        *((300, 413), (327, 1326)),
    ),
    "seqwrite": (
        *((34, 494), (223, 1680), (None, 1217), (None, 2359)),
        *((282, 348), (320, 1255)),
    ),
    "randwrite": (
        *((32, 458), (213, 1343), (None, 663), (None, 1820)),
        *((292, 341), (322, 1094)),
    ),
}
READS = [f"{row}-{column}" for row in ("seqread", "randread") for column in _COLUMNS]
WRITES = [f"{row}-{column}" for row in ("seqwrite", "randwrite") for column in _COLUMNS]

PUBLISHED = Published(
    "the patches of virtiofs' DAX (2020)",
    "Linux 5.6-rc4, a guest with 64 CPUs and a window of 64 GB, a host with ramfs",
    "Theirs are MiB/s, here as I/O of 4 KiB. The DAX column has a stand-in: ext4 with "
    "DAX on persistent memory of the guest.",
    [
        Figure(
            f"{row}-{column}", theirs, ours, "iops", value * float(MIB // BLOCK_BYTES)
        )
        for row, pairs in _ROWS.items()
        for column, pair in zip(_COLUMNS, pairs)
        for theirs, ours, value in zip(
            ("virtiofs", "virtiofs with DAX"), ("virtiofs", "dax-ext4"), pair
        )
        if value is not None
    ],
)
