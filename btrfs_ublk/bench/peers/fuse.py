"""Our server through FUSE and a loop device."""

from __future__ import annotations

from btrfs_ublk.bench.served import served_peers
from btrfs_ublk.capabilities import FUSE

PEERS = served_peers("fuse", FUSE)
