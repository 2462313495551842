"""The block server: its description, its process and its control connection."""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.server.block_server import BlockServer
    from btrfs_ublk.server.control import ControlError
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
    from btrfs_ublk.server.front_ends import choose_front_end
    from btrfs_ublk.server.names import FrontEndName
    from btrfs_ublk.server.stats import (
        Counts,
        FetcherStats,
        FetchLatency,
        KindStats,
        Latencies,
        Latency,
        LazyStats,
        QueueStats,
        ServerStats,
    )
else:
    __getattr__ = exporter(__name__, __file__)
