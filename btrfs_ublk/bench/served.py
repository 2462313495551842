"""Peers that our own block server answers, the same through each front end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.stamps import STAMPS, Content
from btrfs_ublk.capabilities import BTRFS, LOOP, ROOT, Capability
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FileSegment,
    FrontEndName,
    MemsetSegment,
    Segment,
)
from btrfs_ublk.volume import volume

#: What answers reads: a constant, or a file on tmpfs.
Source = Literal["memset", "file"]
_BYTE = 97


def _contents(setting: Setting, source: Source) -> tuple[Segment, Content]:
    size_bytes = setting.size_bytes
    if source == "memset":
        memset = MemsetSegment(offset=0, length=size_bytes, byte=_BYTE)
        return memset, memset
    path = str(setting.source_file())
    return FileSegment(offset=0, length=size_bytes, path=path), STAMPS


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
        return f"our server's device, {self.front_end}, on {_SOURCES[self.source]}"

    @property
    def needs(self) -> Sequence[Capability]:
        return ROOT, self.driver, LOOP

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        segment, content = _contents(setting, self.source)
        with BlockServer(
            Description(setting.size_bytes, [segment]),
            front_end=self.front_end,
            queues=setting.queues,
            depth=setting.depth,
            realtime=setting.realtime,
        ) as server:
            yield Subject(server.device, content, [server.pid])


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
        source = _SOURCES[self.source]
        return f"a clone on a sprout of ours, {self.front_end}, on {source}"

    @property
    def needs(self) -> Sequence[Capability]:
        return ROOT, self.driver, LOOP, BTRFS

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        segment, content = _contents(setting, self.source)
        size_bytes = setting.size_bytes
        with volume(
            setting.new_directory(self.name),
            [segment],
            virtual_data_size=size_bytes,
            parent=setting.directory,
            front_end=self.front_end,
            queues=setting.queues,
            depth=setting.depth,
            realtime=setting.realtime,
        ) as made:
            path = made.clone("clone", offset=0, size_bytes=size_bytes)
            yield Subject(path, content, [made.server.pid])


_SOURCES = {"memset": "one repeated byte", "file": "a file on tmpfs"}


def served_peers(front_end: FrontEndName, driver: Capability) -> list[Peer]:
    """A front end's: NAME, NAME-clone, NAME-file, NAME-file-clone."""
    infixes: dict[Source, str] = {"memset": "", "file": "-file"}
    made: list[Peer] = []
    for source, infix in infixes.items():
        name = f"{front_end}{infix}"
        made.append(ServedDevice(name, front_end, source, driver))
        made.append(Clone(f"{name}-clone", front_end, source, driver))
    return made
