"""Seeds: read-only btrfs templates whose data blocks are virtual."""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.seed.check import check_with_progs
    from btrfs_ublk.seed.fallocate import make_fallocate_seed
    from btrfs_ublk.seed.inspect import inspect_seed
    from btrfs_ublk.seed.layout import DEFAULT_FILENAME, Seed, VirtualData
    from btrfs_ublk.seed.mega_extent import make_seed, parse_report
    from btrfs_ublk.seed.strategies import MEGA_EXTENT, STRATEGIES, make_seed_by
else:
    __getattr__ = exporter(__name__, __file__)
