"""What is fetched when it is read: maps of running servers, and digests of files."""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.content.cache import Cache
    from btrfs_ublk.content.completion import Completion
    from btrfs_ublk.content.digests import Digests, digest_file
    from btrfs_ublk.content.index import Index, digest_indexed, make_index
    from btrfs_ublk.content.maps import (
        Added,
        Addition,
        MapClient,
        Mapping,
        Problem,
        Room,
    )
    from btrfs_ublk.content.prefetch import Prefetch
    from btrfs_ublk.content.refused import Refused
    from btrfs_ublk.content.source import Mirror, Source, SourceKeys
    from btrfs_ublk.content.trace import Trace, TraceSource, TraceWriter
else:
    __getattr__ = exporter(__name__, __file__)
