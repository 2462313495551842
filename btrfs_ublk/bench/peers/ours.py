"""Peers that our block server serves: its device, and a clone on a sprout."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, UBLK, Capability
from btrfs_ublk.bench.content import STAMPS, Content
from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.content import Addition
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FileSegment,
    FrontEndName,
    LazySegment,
    MemsetSegment,
    Segment,
)
from btrfs_ublk.volume.definition import DEFAULT_WRITABLE_BYTES
from btrfs_ublk.volume.temporary import volume

#: What answers reads: a constant, a file on tmpfs, or the local cache (also on tmpfs),
#: which contains all of such a file.
Source = Literal["memset", "file", "cached"]
_BYTE = 97


@contextmanager
def contents(setting: Setting, source: Source) -> Iterator[tuple[Segment, Content]]:
    """Yield the segment to serve, and its expected content. See prepare()."""
    whole: Any = {"offset": 0, "length": setting.size_bytes}
    if source == "cached":
        directory = setting.new_directory("lazy")
        at, cache = str(directory / "map"), str(directory / "cache")
        yield LazySegment(**whole, map=at, cache=cache), STAMPS
        shutil.rmtree(directory)
    elif source == "memset":
        memset = MemsetSegment(**whole, byte=_BYTE)
        yield memset, memset
    else:
        yield FileSegment(**whole, path=str(setting.source_file())), STAMPS


def prepare(setting: Setting, source: Source, server: BlockServer) -> None:
    """Map and fetch what the cache should have, before reads are measured."""
    if source != "cached":
        return
    size_bytes = setting.size_bytes
    described: dict[str, str | int] = {
        "kind": "file",
        "path": str(setting.source_file()),
        "size": size_bytes,
    }
    server.map_add([described], [Addition(offset=0, length=size_bytes)])
    drained = server.map().drain()
    if drained.failed_units or drained.uncached_units:
        raise BtrfsUblkError(
            f"of {size_bytes} bytes, {drained.failed_units} units could not be fetched "
            f"and {drained.uncached_units} not be cached",
            hint="more room for the cache; a twentieth of its file system stays free",
        )


@contextmanager
def _served(
    front_end: FrontEndName, source: Source, setting: Setting
) -> Iterator[Subject]:
    with contents(setting, source) as (segment, content):
        with BlockServer(
            Description(setting.size_bytes, [segment], read_only=True),
            front_end=front_end,
            queues=setting.queues,
            depth=setting.depth,
        ) as server:
            prepare(setting, source, server)
            yield Subject(server.device, content, [server.pid])


@contextmanager
def _clone(
    front_end: FrontEndName, source: Source, setting: Setting
) -> Iterator[Subject]:
    size_bytes = setting.size_bytes
    with (
        contents(setting, source) as (segment, content),
        volume(
            setting.new_directory(f"{front_end}-clone"),
            [segment],
            virtual_data_size=size_bytes,
            writable_bytes=DEFAULT_WRITABLE_BYTES + size_bytes,
            parent=setting.directory,
            front_end=front_end,
            queues=setting.queues,
            depth=setting.depth,
        ) as made,
    ):
        prepare(setting, source, made.server)
        path = made.clone("clone", offset=0, size_bytes=size_bytes)
        yield Subject(path, content, [made.server.pid])


def _peers() -> Iterator[Peer]:
    sources: dict[Source, tuple[str, str]] = {
        "memset": ("", "one repeated byte"),
        "file": ("-file", "a file on tmpfs"),
        "cached": ("-cached", "a full local cache on tmpfs"),
    }
    front_ends: dict[FrontEndName, Capability] = {"fuse": FUSE, "ublk": UBLK}
    for front_end, driver in front_ends.items():
        needs = (ROOT, driver, LOOP)
        for source, (infix, what) in sources.items():
            name = f"{front_end}{infix}"
            yield Peer(
                name,
                "device",
                f"our server's device, {front_end}, on {what}",
                needs,
                partial(_served, front_end, source),
            )
            yield Peer(
                f"{name}-clone",
                "file",
                f"a clone on a sprout of ours, {front_end}, on {what}",
                (*needs, BTRFS),
                partial(_clone, front_end, source),
            )


PEERS = list(_peers())
