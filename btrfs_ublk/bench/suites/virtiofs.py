"""virtiofs, with and without DAX: 24 ways to read and write 4 KiB. QEMU has no window
for virtiofs' DAX, so ext4 with DAX on persistent memory stands in for that column.
"""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.bench.published.virtiofs import PUBLISHED, READS, WRITES
from btrfs_ublk.bench.reading import WRITING
from btrfs_ublk.bench.scale import Amounts, fio_scaling
from btrfs_ublk.bench.suite import Comparison, Suite
from btrfs_ublk.units import GIB

_PEERS = (
    "virtiofs",
    "dax-ext4",
    "fuse-plain-file",
    "fuse-plain-file-cached",
    "fuse-file-clone",
    "tmpfs",
)
#: virtiofs' file is on the host.
_IN_MEMORY = 4


def _comparisons(_: Amounts) -> Sequence[Comparison]:
    return [
        Comparison("reading", _PEERS, READS),
        Comparison("writing", _PEERS, WRITES, contest=WRITING),
    ]


SUITE = Suite(
    "virtiofs, DAX (ext4 on persistent memory stands in), FUSE, clones; in a VM",
    _comparisons,
    scaling=fio_scaling(
        full_bytes=8 * GIB,
        full_s=20,
        copies=_IN_MEMORY,
        measurements=len(_PEERS) * (len(READS) + len(WRITES)),
    ),
    published=PUBLISHED,
)
