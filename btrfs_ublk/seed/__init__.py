"""Seeds: read-only btrfs templates whose data blocks are virtual."""

from btrfs_ublk.seed.fallocate import make_fallocate_seed
from btrfs_ublk.seed.layout import DEFAULT_FILENAME, Seed, VirtualData
from btrfs_ublk.seed.mega_extent import make_seed
from btrfs_ublk.seed.strategies import MEGA_EXTENT, STRATEGIES, make_seed_by

__all__ = [
    "DEFAULT_FILENAME",
    "MEGA_EXTENT",
    "STRATEGIES",
    "Seed",
    "VirtualData",
    "make_fallocate_seed",
    "make_seed",
    "make_seed_by",
]
