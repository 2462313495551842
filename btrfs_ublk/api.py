"""The surface for other programs: ``from btrfs_ublk import …`` takes it from here.

docs/how-to/python-api.md shows its use. Sizes and offsets are bytes, times seconds;
what is wrong is a BtrfsUblkError. Names that do not stand here may change.
"""

from __future__ import annotations

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
from btrfs_ublk.interrupts import Interrupted, interruptible
from btrfs_ublk.lazy import (
    Added,
    Addition,
    Digests,
    Drained,
    MapClient,
    Mapping,
    Prefetch,
    Problem,
    Room,
    Source,
    digest_file,
)
from btrfs_ublk.physmap import MappingError
from btrfs_ublk.resources import (
    LoopDevice,
    Mount,
    clone_file,
    clone_range,
    loop_device,
    mounted,
)
from btrfs_ublk.seed import Seed, make_seed
from btrfs_ublk.server import (
    BlockServer,
    Description,
    ErrorSegment,
    FileSegment,
    LazySegment,
    MemsetSegment,
    PatternSegment,
    Segment,
    ServerStats,
    ZeroSegment,
)
from btrfs_ublk.sprout import Sprout
from btrfs_ublk.sprout import sprout as sprouted
from btrfs_ublk.units import format_size, parse_size
from btrfs_ublk.volume import Volume
from btrfs_ublk.volume import volume as temporary_volume
from btrfs_ublk.volumes import (
    FoundDefinition,
    KeptFile,
    KeptVolume,
    VolumeDefinition,
    VolumeFile,
    clone_in_volume,
    down_volume,
    find_definition,
    kept_volume,
    list_volumes,
    read_definition,
    remove_volume,
    show_volume,
    up_volume,
)

__all__ = [
    "Added",
    "Addition",
    "BlockServer",
    "BtrfsUblkError",
    "CapabilityError",
    "CommandError",
    "Description",
    "Device",
    "DeviceOptions",
    "Digests",
    "Drained",
    "ErrorSegment",
    "FileSegment",
    "FoundDefinition",
    "Interrupted",
    "KeptFile",
    "KeptVolume",
    "LazySegment",
    "LeftoverError",
    "LoopDevice",
    "MapClient",
    "Mapping",
    "MappingError",
    "MemsetSegment",
    "Mount",
    "PatternSegment",
    "Prefetch",
    "Problem",
    "Room",
    "Seed",
    "Segment",
    "ServerStats",
    "Source",
    "Sprout",
    "UsageError",
    "Volume",
    "VolumeDefinition",
    "VolumeFile",
    "ZeroSegment",
    "add_device",
    "clone_file",
    "clone_in_volume",
    "clone_range",
    "device_map",
    "digest_file",
    "down_volume",
    "find_definition",
    "format_size",
    "interruptible",
    "kept_volume",
    "list_devices",
    "list_volumes",
    "loop_device",
    "make_seed",
    "mounted",
    "parse_size",
    "read_definition",
    "recover_device",
    "remove_device",
    "remove_volume",
    "show_device",
    "show_volume",
    "sprouted",
    "supervised_device",
    "temporary_volume",
    "up_volume",
]
