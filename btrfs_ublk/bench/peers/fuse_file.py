"""The file that our server exports through FUSE, read as it is: no loop device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.served import SOURCES, Source, served
from btrfs_ublk.capabilities import FUSE, LOOP, ROOT, Capability


@dataclass(frozen=True)
class FuseFile:
    name: str
    source: Source
    #: NB: the server's file is not cached otherwise, whatever a reader asks for.
    cached: bool = False

    layer: ClassVar[Literal["file"]] = "file"
    # The server is one that has a loop device as well, which nobody uses.
    needs: ClassVar[Sequence[Capability]] = (ROOT, FUSE, LOOP)

    @property
    def description(self) -> str:
        how = ", through the page cache" if self.cached else ""
        return f"our server's file in FUSE, no loop device{how}, {SOURCES[self.source]}"

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        with served(setting, self.source, "fuse", page_cache=self.cached) as (
            server,
            content,
            may_write,
        ):
            yield Subject(
                server.file,
                content,
                [server.pid],
                direct=not self.cached,
                writable=may_write and not self.cached,
                mappable=self.cached,
            )


PEERS: Sequence[Peer] = [
    FuseFile("fuse-plain", "memset"),
    FuseFile("fuse-plain-file", "file"),
    FuseFile("fuse-plain-file-cached", "file", cached=True),
]
