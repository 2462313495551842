"""rublk, another project's ublk server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from btrfs_ublk.base.capabilities import ROOT, UBLK
from btrfs_ublk.bench.known_content import STAMPS, Content
from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.resources.foreign import foreign_device
from btrfs_ublk.server import ZeroSegment

#: Names the program if it is not on PATH.
RUBLK_VARIABLE = "BTRFS_UBLK_RUBLK"


@dataclass(frozen=True)
class _Rublk:
    name: ClassVar[str] = "rublk"
    hint: ClassVar[str] = f"cargo install rublk; or name it in {RUBLK_VARIABLE}"

    def path(self) -> str:
        return os.environ.get(RUBLK_VARIABLE) or self.name

    def probe(self) -> str | None:
        if shutil.which(self.path()):
            return None
        named = os.environ.get(RUBLK_VARIABLE)
        where = f"at {named}, as {RUBLK_VARIABLE} says" if named else "on PATH"
        return f"the program {self.name} is not {where}"


RUBLK = _Rublk()


@contextmanager
def _rublk(target: str, setting: Setting) -> Iterator[Subject]:
    argv = [RUBLK.path(), "add", target, "--foreground", "--quiet"]
    for option, value in (("--queue", setting.queues), ("--depth", setting.depth)):
        argv += [] if value is None else [option, str(value)]
    content: Content = ZeroSegment(offset=0, length=setting.size_bytes)
    if target == "loop":
        content = STAMPS
        argv += ["--read-only", "--file", str(setting.source_file())]
    with foreign_device(argv, delete=[RUBLK.path(), "del", "--number"]) as device:
        yield Subject(device.path, content, [device.pid])


PEERS = [
    Peer(
        *(f"rublk-{target}", "device", f"rublk: {what}", (ROOT, UBLK, RUBLK)),
        partial(_rublk, target),
    )
    for target, what in (
        ("null", "completes every request at once, reads zeroes"),
        ("loop", "a file on tmpfs, by io_uring and direct I/O"),
    )
]
