"""Our server through ublk."""

from __future__ import annotations

from btrfs_ublk.bench.served import served_peers
from btrfs_ublk.capabilities import UBLK

PEERS = served_peers("ublk", UBLK)
