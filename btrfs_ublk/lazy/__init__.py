"""What is fetched when it is read: maps of running servers, and digests of files."""

from btrfs_ublk.lazy.digests import Digests, digest_file
from btrfs_ublk.lazy.maps import (
    Added,
    Addition,
    Drained,
    MapClient,
    Mapping,
    Problem,
    Room,
    Source,
)
from btrfs_ublk.lazy.prefetch import Prefetch
from btrfs_ublk.lazy.trace import Trace, TraceSource, TraceWriter

__all__ = [
    "Added",
    "Addition",
    "Digests",
    "Drained",
    "MapClient",
    "Mapping",
    "Prefetch",
    "Problem",
    "Room",
    "Source",
    "Trace",
    "TraceSource",
    "TraceWriter",
    "digest_file",
]
