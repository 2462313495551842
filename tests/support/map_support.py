"""A server with one map, for tests of requests to it."""

from __future__ import annotations

from pathlib import Path

from btrfs_ublk.content import Source
from btrfs_ublk.server import Description, LazySegment
from btrfs_ublk.units import GIB, KIB

SIZE = GIB
UNIT = 64 * KIB
MEMSET: Source = {"kind": "memset", "size": GIB, "byte": 97}
PATTERN: Source = {"kind": "pattern", "size": GIB}


def description(tmp_path: Path, *, cached: bool = True) -> Description:
    cache = str(tmp_path / "cache") if cached else None
    segment = LazySegment(
        offset=0, length=SIZE, map=str(tmp_path / "it.map"), cache=cache, deadline_s=5
    )
    return Description(SIZE, [segment])
