"""No block layer at all: a file on tmpfs, and /dev/zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.stamps import STAMPS
from btrfs_ublk.capabilities import Capability
from btrfs_ublk.server import ZeroSegment


@dataclass(frozen=True)
class Tmpfs:
    name: ClassVar[str] = "tmpfs"
    layer: ClassVar[Literal["file"]] = "file"
    description: ClassVar[str] = "a file on tmpfs: the page cache itself"
    needs: ClassVar[Sequence[Capability]] = ()

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        with setting.content_file() as path:
            yield Subject(path, STAMPS, direct=False, writable=setting.writable)


@dataclass(frozen=True)
class DevZero:
    name: ClassVar[str] = "dev-zero"
    layer: ClassVar[Literal["file"]] = "file"
    description: ClassVar[str] = "/dev/zero: what the reader itself costs"
    needs: ClassVar[Sequence[Capability]] = ()

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        content = ZeroSegment(offset=0, length=setting.size_bytes)
        yield Subject(Path("/dev/zero"), content, direct=False)


PEERS: Sequence[Peer] = [Tmpfs(), DevZero()]
