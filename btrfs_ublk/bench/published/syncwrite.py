"""The posting of ZUFS, 2018, with the columns of its table put right."""

from __future__ import annotations

from btrfs_ublk.bench.figures import Figure, Published

THREADS = (1, 2, 4, 7, 8)
#: What they called it, what is or stands in for it here, thousands of I/O per second.
_ROWS = (
    ("FUSE", "fuse-least", (33.6, 57.1, 88.7, 116.6, 129.1)),
    ("FUSE with splice", None, (39.7, 51.1, 75.2, 97.7, 98.0)),
    ("ZUFS", "dax-ext4", (260, 496, 957, 1125, 1100)),
)


def workload_name(threads: int) -> str:
    return f"randwrite-osync-j{threads}" if threads > 1 else "randwrite-osync"


PUBLISHED = Published(
    "the posting of ZUFS (2018)",
    "a KVM guest with 8 CPUs, and DRAM as persistent memory",
    "ZUFS is out of tree and dead: ext4 with DAX stands in for it. Its two columns are "
    "swapped in the original. FUSE there was a file system in memory; here it is as "
    "little as a server can do, with memory.",
    [
        Figure(workload_name(threads), theirs, ours, "iops", values[column] * 1e3)
        for column, threads in enumerate(THREADS)
        for theirs, ours, values in _ROWS
    ],
)
