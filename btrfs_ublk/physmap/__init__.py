"""Logical-to-physical mapping of btrfs files: listing it, and asserting what it is."""

from btrfs_ublk.physmap.columns import Columns
from btrfs_ublk.physmap.physical_map import ContiguousRun, PhysicalMap
from btrfs_ublk.physmap.rows import MappingError, MapRow

__all__ = ["Columns", "ContiguousRun", "MapRow", "MappingError", "PhysicalMap"]
