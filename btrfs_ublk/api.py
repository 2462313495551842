"""The API for other programs: ``from btrfs_ublk import …`` takes it from here.

docs/how-to/python-api.md shows its use. Sizes and offsets are bytes, times seconds;
errors are BtrfsUblkErrors. Names that are not listed here may change.
"""

from __future__ import annotations

from btrfs_ublk.base.signals import Interrupted, interruptible
from btrfs_ublk.content import (
    Added,
    Addition,
    Completion,
    Digests,
    MapClient,
    Mapping,
    Mirror,
    Prefetch,
    Problem,
    Refused,
    Room,
    Source,
    digest_file,
)
from btrfs_ublk.device import (
    Device,
    DeviceOptions,
    add_device,
    device_map,
    list_devices,
    recover_device,
    remove_device,
    show_device,
    supervised_device,
)
from btrfs_ublk.errors import (
    BtrfsUblkError,
    CapabilityError,
    CommandError,
    LeftoverError,
    UsageError,
)
from btrfs_ublk.kernel import (
    LoopDevice,
    Mount,
    MountInfo,
    clone_file,
    clone_range,
    loop_device,
    mounted,
)
from btrfs_ublk.physmap import ContiguousRun, MappingError, MapRow, PhysicalMap
from btrfs_ublk.seed import Seed, VirtualData, make_seed
from btrfs_ublk.server import (
    BlockServer,
    ControlError,
    Counts,
    Description,
    ErrorSegment,
    FetcherStats,
    FetchLatency,
    FileSegment,
    KindStats,
    Latencies,
    Latency,
    LazySegment,
    LazyStats,
    MemsetSegment,
    PatternSegment,
    QueueStats,
    Segment,
    ServerStats,
    ZeroSegment,
)
from btrfs_ublk.units import format_size, parse_size
from btrfs_ublk.volume import (
    FoundDefinition,
    KeptFile,
    KeptVolume,
    NamedVolume,
    VolumeDefinition,
    VolumeFile,
    Volumes,
    VolumeSnapshot,
    VolumeTree,
    clone_in_volume,
    down_volume,
    find_definition,
    kept_volume,
    list_volumes,
    read_definition,
    remove_snapshot,
    remove_volume,
    resize_volume,
    rollback_volume,
    show_volume,
    snapshot_volume,
    snapshots_of_volume,
    up_volume,
)
from btrfs_ublk.volume.sprout import Sprout
from btrfs_ublk.volume.sprout import sprout as sprouted
from btrfs_ublk.volume.temporary import Volume, virtual_file_of
from btrfs_ublk.volume.temporary import volume as temporary_volume

# fmt: off
__all__ = [
    "Added", "Addition", "BlockServer", "BtrfsUblkError", "CapabilityError",
    "CommandError", "Completion", "ContiguousRun", "ControlError", "Counts",
    "Description", "Device", "DeviceOptions", "Digests", "ErrorSegment", "FetchLatency",
    "FetcherStats", "FileSegment", "FoundDefinition", "Interrupted", "KeptFile",
    "KeptVolume", "KindStats", "Latencies", "Latency", "LazySegment", "LazyStats",
    "LeftoverError", "LoopDevice", "MapClient", "MapRow", "Mapping", "MappingError",
    "MemsetSegment", "Mirror", "Mount", "MountInfo", "NamedVolume", "PatternSegment",
    "PhysicalMap", "Prefetch", "Problem", "QueueStats", "Refused", "Room", "Seed",
    "Segment", "ServerStats", "Source", "Sprout", "UsageError", "VirtualData", "Volume",
    "VolumeDefinition", "VolumeFile", "VolumeSnapshot", "VolumeTree", "Volumes",
    "ZeroSegment", "add_device", "clone_file", "clone_in_volume", "clone_range",
    "device_map", "digest_file", "down_volume", "find_definition", "format_size",
    "interruptible", "kept_volume", "list_devices", "list_volumes", "loop_device",
    "make_seed", "mounted", "parse_size", "read_definition", "recover_device",
    "remove_device", "remove_snapshot", "remove_volume", "resize_volume",
    "rollback_volume", "show_device", "show_volume", "snapshot_volume",
    "snapshots_of_volume", "sprouted", "supervised_device", "temporary_volume",
    "up_volume", "virtual_file_of",
]
# fmt: on
