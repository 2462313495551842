"""Seeds: read-only btrfs templates whose data blocks are virtual."""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.seed.check import SeedReport, check_seed, check_with_progs
    from btrfs_ublk.seed.fallocate import make_fallocate_seed
    from btrfs_ublk.seed.inspect import SeedLayout, inspect_seed
    from btrfs_ublk.seed.layout import DEFAULT_FILENAME, Seed, VirtualData
    from btrfs_ublk.seed.mega_extent import make_seed, parse_report
    from btrfs_ublk.seed.strategies import MEGA_EXTENT, STRATEGIES, make_seed_by
else:
    __getattr__ = exporter(
        __name__,
        {
            "check": "SeedReport check_seed check_with_progs",
            "fallocate": "make_fallocate_seed",
            "inspect": "SeedLayout inspect_seed",
            "layout": "DEFAULT_FILENAME Seed VirtualData",
            "mega_extent": "make_seed parse_report",
            "strategies": "MEGA_EXTENT STRATEGIES make_seed_by",
        },
    )

__all__ = [
    "DEFAULT_FILENAME",
    "MEGA_EXTENT",
    "STRATEGIES",
    "Seed",
    "SeedLayout",
    "SeedReport",
    "VirtualData",
    "check_seed",
    "check_with_progs",
    "inspect_seed",
    "make_fallocate_seed",
    "make_seed",
    "make_seed_by",
    "parse_report",
]
