"""The block server: what it serves, its process, its control connection."""

from btrfs_ublk.server.block_server import BlockServer
from btrfs_ublk.server.description import (
    Description,
    ErrorSegment,
    FileSegment,
    LazySegment,
    MemsetSegment,
    PatternSegment,
    Segment,
    ZeroSegment,
)
from btrfs_ublk.server.devices import DeviceRecord, device_records
from btrfs_ublk.server.foreign import ForeignDevice, foreign_device
from btrfs_ublk.server.front_ends import FrontEndName, choose_front_end
from btrfs_ublk.server.stats import (
    FetcherStats,
    KindStats,
    Latency,
    LazyStats,
    QueueStats,
    ServerStats,
)

__all__ = [
    "BlockServer",
    "Description",
    "DeviceRecord",
    "ErrorSegment",
    "FetcherStats",
    "FileSegment",
    "ForeignDevice",
    "FrontEndName",
    "KindStats",
    "Latency",
    "LazySegment",
    "LazyStats",
    "MemsetSegment",
    "PatternSegment",
    "QueueStats",
    "Segment",
    "ServerStats",
    "ZeroSegment",
    "choose_front_end",
    "device_records",
    "foreign_device",
]
