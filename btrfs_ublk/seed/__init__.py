"""Seeds: read-only btrfs templates whose data blocks are virtual."""

from btrfs_ublk.seed.layout import DEFAULT_FILENAME, Seed, VirtualData
from btrfs_ublk.seed.mega_extent import make_seed

__all__ = ["DEFAULT_FILENAME", "Seed", "VirtualData", "make_seed"]
