"""Peers that our own block server answers, the same through each front end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.stamps import STAMPS, Content
from btrfs_ublk.capabilities import BTRFS, LOOP, ROOT, Capability
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.lazy import Addition
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FileSegment,
    FrontEndName,
    LazySegment,
    MemsetSegment,
    Segment,
)
from btrfs_ublk.sprout import DEFAULT_WRITABLE_BYTES
from btrfs_ublk.volume import volume

#: What answers reads: a constant, a file on tmpfs, or the local cache (on tmpfs, too),
#: in which all of such a file is.
Source = Literal["memset", "file", "cached"]
_BYTE = 97


@contextmanager
def contents(setting: Setting, source: Source) -> Iterator[tuple[Segment, Content]]:
    """What a server answers, and what must be read of it. See prepare()."""
    size_bytes = setting.size_bytes
    if source == "cached":
        directory = setting.new_directory("lazy")
        yield LazySegment(
            offset=0,
            length=size_bytes,
            map=str(directory / "map"),
            cache=str(directory / "cache"),
        ), STAMPS
        shutil.rmtree(directory)
        return
    if source == "memset":
        memset = MemsetSegment(offset=0, length=size_bytes, byte=_BYTE)
        yield memset, memset
        return
    with setting.content_file() as path:
        writable = setting.writable
        yield FileSegment(
            offset=0, length=size_bytes, path=str(path), writable=writable
        ), STAMPS


def prepare(setting: Setting, source: Source, server: BlockServer) -> None:
    """Before it is read from: what is to be cached is mapped, and fetched."""
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
def served(
    setting: Setting,
    source: Source,
    front_end: FrontEndName,
    *,
    page_cache: bool = False,
) -> Iterator[tuple[BlockServer, Content, bool]]:
    """A server of it, what must be read, and whether it can be written."""
    with ExitStack() as stack:
        segment, content = stack.enter_context(contents(setting, source))
        writable = setting.writable and source == "file"
        server = BlockServer(
            Description(setting.size_bytes, [segment], read_only=not writable),
            front_end=front_end,
            queues=setting.queues,
            depth=setting.depth,
            realtime=setting.realtime,
            page_cache=page_cache,
        )
        stack.enter_context(server)
        prepare(setting, source, server)
        yield server, content, writable


SOURCES = {
    "memset": "one repeated byte",
    "file": "a file on tmpfs",
    "cached": "a full local cache on tmpfs",
}


@dataclass(frozen=True)
class ServedDevice:
    """The block device of a server."""

    name: str
    front_end: FrontEndName
    source: Source
    driver: Capability

    layer: Literal["device"] = "device"

    @property
    def description(self) -> str:
        return f"our server's device, {self.front_end}, on {SOURCES[self.source]}"

    @property
    def needs(self) -> Sequence[Capability]:
        return ROOT, self.driver, LOOP

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        with served(setting, self.source, self.front_end) as (server, content, may):
            yield Subject(server.device, content, [server.pid], writable=may)


@dataclass(frozen=True)
class Clone:
    """A cloned file of a sprout, whose data a server answers."""

    name: str
    front_end: FrontEndName
    source: Source
    driver: Capability

    layer: Literal["file"] = "file"

    @property
    def description(self) -> str:
        source = SOURCES[self.source]
        return f"a clone on a sprout of ours, {self.front_end}, on {source}"

    @property
    def needs(self) -> Sequence[Capability]:
        return ROOT, self.driver, LOOP, BTRFS

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        size_bytes = setting.size_bytes
        # What is written lands on the sprout's own device: what is served is only read.
        read_only = replace(setting, writable=False)
        with ExitStack() as stack:
            segment, content = stack.enter_context(contents(read_only, self.source))
            made = stack.enter_context(
                volume(
                    setting.new_directory(self.name),
                    [segment],
                    virtual_data_size=size_bytes,
                    writable_bytes=DEFAULT_WRITABLE_BYTES + size_bytes,
                    parent=setting.directory,
                    front_end=self.front_end,
                    queues=setting.queues,
                    depth=setting.depth,
                    realtime=setting.realtime,
                )
            )
            prepare(read_only, self.source, made.server)
            path = made.clone("clone", offset=0, size_bytes=size_bytes)
            yield Subject(path, content, [made.server.pid], writable=True)


def served_peers(front_end: FrontEndName, driver: Capability) -> list[Peer]:
    """A front end's: NAME, NAME-file, NAME-cached; and NAME[…]-clone of each."""
    infixes: dict[Source, str] = {"memset": "", "file": "-file", "cached": "-cached"}
    made: list[Peer] = []
    for source, infix in infixes.items():
        name = f"{front_end}{infix}"
        made.append(ServedDevice(name, front_end, source, driver))
        made.append(Clone(f"{name}-clone", front_end, source, driver))
    return made
