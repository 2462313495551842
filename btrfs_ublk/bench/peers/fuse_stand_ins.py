"""The least that a FUSE server can do, by each way that there is to reach one: what any
file system in FUSE, ours among them, could be at best.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.stamps import STAMPS
from btrfs_ublk.capabilities import FUSE, ROOT, Capability
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError
from btrfs_ublk.helpers import FUSE_STAND_IN, helper_path
from btrfs_ublk.process import readable, run, spawn
from btrfs_ublk.units import BLOCK_BYTES

_TIMEOUT_S = 20.0
How = Literal["device", "io-uring", "passthrough"]
_CURES: dict[How, str] = {
    "device": "modprobe fuse",
    "io-uring": "Linux 6.14 with CONFIG_FUSE_IO_URING, and "
    "echo Y > /sys/module/fuse/parameters/enable_uring",
    "passthrough": "Linux 6.9 with CONFIG_FUSE_PASSTHROUGH",
}


@dataclass(frozen=True)
class FuseBy:
    """That way to reach a server, tried."""

    how: How

    @property
    def name(self) -> str:
        return f"FUSE by {self.how}"

    @property
    def cure(self) -> str:
        return _CURES[self.how]

    def probe(self) -> str | None:
        with tempfile.NamedTemporaryFile(prefix="btrfs-ublk-") as file:
            file.truncate(BLOCK_BYTES)
            try:
                run(_argv(self.how, Path(file.name)), timeout_s=_TIMEOUT_S)
            except CapabilityError as error:
                return error.message
            except BtrfsUblkError:
                return f"the kernel refuses it; {self.cure}"
        return None


def _argv(how: How, path: Path) -> list[str | Path]:
    """It serves until its standard input ends."""
    return [helper_path(FUSE_STAND_IN), "--how", how, path]


@dataclass(frozen=True)
class FuseStandIn:
    name: str
    how: How
    description: str

    layer: ClassVar[Literal["file"]] = "file"

    @property
    def needs(self) -> Sequence[Capability]:
        return ROOT, FUSE, FuseBy(self.how)

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        with ExitStack() as stack:
            content = stack.enter_context(setting.content_file())
            reading_fd, writing_fd = os.pipe()
            lifeline = stack.enter_context(open(reading_fd, "rb"))
            stack.enter_context(open(writing_fd, "wb"))
            server = stack.enter_context(
                spawn(_argv(self.how, content), stdin=lifeline, pipe_stdout=True)
            )
            assert server.stdout is not None
            line = ""
            if readable([server.stdout], timeout_s=_TIMEOUT_S):
                line = server.stdout.readline()
            if not line:
                raise BtrfsUblkError(server.failure("did not come up"))
            yield Subject(
                Path(json.loads(line)["file"]),
                STAMPS,
                [server.pid],
                writable=setting.writable,
                # What goes past the page cache cannot be shared with it.
                mappable=self.how == "passthrough",
            )


PEERS: Sequence[Peer] = [
    FuseStandIn(
        "fuse-least", "device", "FUSE: memory, copied by a thread for each CPU"
    ),
    FuseStandIn(
        "fuse-least-io-uring", "io-uring", "FUSE over io_uring: memory, copied"
    ),
    FuseStandIn(
        "fuse-least-passthrough",
        "passthrough",
        "FUSE with passthrough: the kernel does it all, on tmpfs",
    ),
]
