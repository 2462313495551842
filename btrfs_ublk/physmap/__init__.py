"""Logical-to-physical mapping of btrfs files: listing and checking it."""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.physmap.physical_map import ContiguousRun, PhysicalMap
    from btrfs_ublk.physmap.rows import MappingError, MapRow
else:
    __getattr__ = exporter(__name__, __file__)
