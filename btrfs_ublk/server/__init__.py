"""The block server: what it serves, its process, its control connection."""

from btrfs_ublk.server.block_server import BlockServer
from btrfs_ublk.server.description import (
    Description,
    ErrorSegment,
    FileSegment,
    MemsetSegment,
    PatternSegment,
    Segment,
    ZeroSegment,
)
from btrfs_ublk.server.devices import DeviceRecord, device_records

__all__ = [
    "BlockServer",
    "Description",
    "DeviceRecord",
    "ErrorSegment",
    "FileSegment",
    "MemsetSegment",
    "PatternSegment",
    "Segment",
    "ZeroSegment",
    "device_records",
]
