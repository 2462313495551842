"""rublk, a ublk server in Rust: its null target, and its loop target on tmpfs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.stamps import STAMPS, Content
from btrfs_ublk.capabilities import ROOT, UBLK, Capability
from btrfs_ublk.server import ZeroSegment, foreign_device

#: Names the program, where it is not on PATH.
PROGRAM_VARIABLE = "BTRFS_UBLK_RUBLK"


@dataclass(frozen=True)
class _Program:
    name: ClassVar[str] = "rublk"
    cure: ClassVar[str] = f"cargo install rublk; or name it in {PROGRAM_VARIABLE}"

    def path(self) -> str | None:
        return shutil.which(os.environ.get(PROGRAM_VARIABLE) or self.name)

    def probe(self) -> str | None:
        named = os.environ.get(PROGRAM_VARIABLE)
        where = f"at {named}, as {PROGRAM_VARIABLE} says" if named else "on PATH"
        return None if self.path() else f"it is not {where}"


RUBLK = _Program()


@dataclass(frozen=True)
class Rublk:
    target: Literal["null", "loop"]
    description: str

    layer: ClassVar[Literal["device"]] = "device"
    needs: ClassVar[Sequence[Capability]] = (ROOT, UBLK, RUBLK)

    @property
    def name(self) -> str:
        return f"rublk-{self.target}"

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        program = RUBLK.path() or RUBLK.name
        argv = [program, "add", self.target, "--foreground", "--quiet"]
        if setting.queues is not None:
            argv += ["--queue", str(setting.queues)]
        if setting.depth is not None:
            argv += ["--depth", str(setting.depth)]
        content: Content = ZeroSegment(offset=0, length=setting.size_bytes)
        if self.target == "loop":
            content = STAMPS
            argv += ["--read-only", "--file", str(setting.source_file())]
        delete = [program, "del", "--number"]
        with foreign_device(argv, delete=delete) as device:
            yield Subject(device.path, content, [device.pid])


PEERS: Sequence[Peer] = [
    Rublk("null", "rublk: completes every request at once, reads zeroes"),
    Rublk("loop", "rublk: a file on tmpfs, by io_uring and direct I/O"),
]
