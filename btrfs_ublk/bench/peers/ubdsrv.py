"""ubdsrv (ublksrv), the ublk server in C++ of ublk's own author: null and loop."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.stamps import STAMPS, Content
from btrfs_ublk.capabilities import ROOT, UBLK, Capability
from btrfs_ublk.server import ZeroSegment, foreign_device

#: Names the program "ublk", where it is not on PATH.
PROGRAM_VARIABLE = "BTRFS_UBLK_UBDSRV"


@dataclass(frozen=True)
class Target:
    """The program of one target, ublk.TARGET. It is beside "ublk", which would leave
    it running in the background; by itself it stays in the foreground.
    """

    target: str

    name: ClassVar[str] = "ubdsrv"
    cure: ClassVar[str] = (
        f"build ublksrv (github.com/ublk-org), name its ublk in {PROGRAM_VARIABLE}"
    )

    def manager(self) -> str | None:
        """ "ublk" itself, which removes devices."""
        found = shutil.which(os.environ.get(PROGRAM_VARIABLE) or "ublk")
        return os.path.realpath(found) if found else None

    def path(self) -> Path:
        return Path(f"{self.manager()}.{self.target}")

    def probe(self) -> str | None:
        named = os.environ.get(PROGRAM_VARIABLE)
        where = f"at {named}, as {PROGRAM_VARIABLE} says" if named else "on PATH"
        if self.manager() is None:
            return f"ublk is not {where}"
        if not os.access(self.path(), os.X_OK):
            return f"there is no {self.path()} (before version 1.2 it had none)"
        return None


@dataclass(frozen=True)
class Ubdsrv:
    target: Literal["null", "loop"]
    description: str

    layer: ClassVar[Literal["device"]] = "device"

    @property
    def needs(self) -> Sequence[Capability]:
        return ROOT, UBLK, Target(self.target)

    @property
    def name(self) -> str:
        return f"ubdsrv-{self.target}"

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        program = Target(self.target)
        argv: list[str | Path] = [program.path(), "add", "-t", self.target]
        if setting.queues is not None:
            argv += ["-q", str(setting.queues)]
        if setting.depth is not None:
            argv += ["-d", str(setting.depth)]
        content: Content = ZeroSegment(offset=0, length=setting.size_bytes)
        if self.target == "loop":
            content = STAMPS
            argv += ["-f", setting.source_file()]
        delete = [program.manager() or "ublk", "del", "-n"]
        with foreign_device(argv, delete=delete) as device:
            yield Subject(device.path, content, [device.pid])


PEERS: Sequence[Peer] = [
    Ubdsrv("null", "ubdsrv: completes every request at once, reads zeroes"),
    Ubdsrv("loop", "ubdsrv: a file on tmpfs, by io_uring and direct I/O"),
]
