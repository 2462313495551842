"""Files of others' file systems: virtiofs, and a minimal FUSE server, reached in each
possible way, which shows the best that any file system in FUSE could do.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from btrfs_ublk.base.capabilities import FUSE, ROOT, Probed
from btrfs_ublk.base.helpers import FUSE_STAND_IN, helper_path
from btrfs_ublk.base.process import readable, run, spawn
from btrfs_ublk.bench.content import STAMPS, write_content
from btrfs_ublk.bench.peer import Peer, Setting, Subject, peer
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import BLOCK_BYTES

_NAME = "file"
_TIMEOUT_S = 20.0


def _virtiofs_target() -> Path | None:
    """Return where a writable one is mounted."""
    mounts = (x for x in read_mountinfo() if x.fs_type == "virtiofs")
    return next((x.target for x in mounts if not x.read_only), None)


_VIRTIOFS = Probed(
    "virtiofs",
    "run this in a VM: scripts/vm",
    lambda: None if _virtiofs_target() else "nothing of it is mounted writable here",
)


@peer("virtiofs", "file", "a file of the host through virtiofs", (_VIRTIOFS,))
def _virtiofs(setting: Setting) -> Iterator[Subject]:
    """The host's caching depends on how the guest was started."""
    with tempdir(parent=_virtiofs_target()) as directory:
        path = directory / _NAME
        write_content(path, STAMPS, setting.size_bytes)
        yield Subject(path, STAMPS, writable=True)


How = Literal["device", "io-uring", "passthrough"]
_STAND_INS: dict[str, tuple[How, str]] = {
    "fuse-least": ("device", "FUSE: memory, copied by a thread for each CPU"),
    "fuse-least-io-uring": ("io-uring", "FUSE over io_uring: memory, copied"),
    "fuse-least-passthrough": (
        "passthrough",
        "FUSE with passthrough: the kernel does it all, on tmpfs",
    ),
}
_CURES: dict[How, str] = {
    "device": "modprobe fuse",
    "io-uring": "Linux 6.14 with CONFIG_FUSE_IO_URING, and "
    "echo Y > /sys/module/fuse/parameters/enable_uring",
    "passthrough": "Linux 6.9 with CONFIG_FUSE_PASSTHROUGH",
}


def _fuse_by(how: How) -> Probed:
    """Make the capability of a way to reach a FUSE server; the probe tries it."""

    def probe() -> str | None:
        with tempfile.NamedTemporaryFile(prefix="btrfs-ublk-") as file:
            file.truncate(BLOCK_BYTES)
            try:
                run(_argv(how, Path(file.name)), timeout_s=_TIMEOUT_S)
            except CapabilityError as error:
                return error.message
            except BtrfsUblkError:
                return f"the kernel refuses it; {_CURES[how]}"
        return None

    return Probed(f"FUSE by {how}", _CURES[how], probe)


def _argv(how: How, path: Path) -> list[str | Path]:
    """Return the argv of a server that serves until its standard input ends."""
    return [helper_path(FUSE_STAND_IN), "--how", how, path]


@contextmanager
def _stand_in(how: How, setting: Setting) -> Iterator[Subject]:
    with ExitStack() as stack:
        content = stack.enter_context(setting.content_file())
        reading_fd, writing_fd = os.pipe()
        lifeline = stack.enter_context(open(reading_fd, "rb"))
        stack.enter_context(open(writing_fd, "wb"))
        server = stack.enter_context(
            spawn(_argv(how, content), stdin=lifeline, pipe_stdout=True)
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
            # Data that bypass the page cache cannot be mapped as shared.
            mappable=how == "passthrough",
        )


PEERS = [
    *(
        Peer(name, "file", what, (ROOT, FUSE, _fuse_by(how)), partial(_stand_in, how))
        for name, (how, what) in _STAND_INS.items()
    ),
    _virtiofs,
]
