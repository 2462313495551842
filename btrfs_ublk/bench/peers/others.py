"""rublk and kublk, ublk servers of other projects: on nothing, and on a file."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from btrfs_ublk.base.capabilities import ROOT, UBLK
from btrfs_ublk.bench.content import STAMPS, Content
from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.resources.foreign import foreign_device
from btrfs_ublk.server import ZeroSegment


@dataclass(frozen=True)
class Foreign:
    """A program on PATH, or where ``variable`` says."""

    name: str
    variable: str
    how: str

    @property
    def hint(self) -> str:
        return f"{self.how}; or name it in {self.variable}"

    def path(self) -> str:
        return os.environ.get(self.variable) or self.name

    def probe(self) -> str | None:
        if shutil.which(self.path()):
            return None
        named = os.environ.get(self.variable)
        where = f"at {named}, as {self.variable} says" if named else "on PATH"
        return f"the program {self.name} is not {where}"


RUBLK = Foreign("rublk", "BTRFS_UBLK_RUBLK", "cargo install rublk")
KUBLK = Foreign(
    "kublk",
    "BTRFS_UBLK_KUBLK",
    "build it in tools/testing/selftests/ublk of Linux' source",
)


@contextmanager
def _served(program: Foreign, target: str, setting: Setting) -> Iterator[Subject]:
    content: Content = ZeroSegment(offset=0, length=setting.size_bytes)
    path = None
    if target == "loop":
        content, path = STAMPS, setting.source_file()
    kind = "loop" if path else "null"
    if program is RUBLK:
        argv = [program.path(), "add", kind, "--foreground", "--quiet"]
        given, delete = ("--queue", "--depth"), "--number"
        argv += ["--read-only", "--file", str(path)] if path else []
    else:
        argv = [program.path(), "add", "-t", kind, "--foreground"]
        given, delete = ("-q", "-d"), "-n"
    for option, value in zip(given, (setting.queues, setting.depth)):
        argv += [] if value is None else [option, str(value)]
    argv += [str(path)] if path and program is KUBLK else []
    with foreign_device(argv, delete=[program.path(), "del", delete]) as device:
        yield Subject(device.path, content, [device.pid])


PEERS = [
    Peer(
        f"{program.name}-{target}",
        "device",
        f"{program.name}: {what}",
        (ROOT, UBLK, program),
        partial(_served, program, target),
    )
    for program in (RUBLK, KUBLK)
    for target, what in (
        ("null", "completes every request at once, reads zeroes"),
        ("loop", "a file on tmpfs, by io_uring"),
    )
]
