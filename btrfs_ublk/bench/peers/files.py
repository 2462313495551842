"""Files of others' file systems: uncompressed EROFS on tmpfs, with overlayfs or
composefs on it; virtiofs; and a minimal FUSE server, reached in each possible way,
which shows the best that any file system in FUSE could do.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from btrfs_ublk.base.capabilities import FUSE, LOOP, ROOT, Capability
from btrfs_ublk.base.helpers import FUSE_STAND_IN, helper_path
from btrfs_ublk.base.process import readable, run, spawn
from btrfs_ublk.bench.known_content import STAMPS, write_content
from btrfs_ublk.bench.peer import Peer, Setting, Subject, peer
from btrfs_ublk.bench.read_only import (
    EROFS,
    EXT4,
    MKCOMPOSEFS,
    MKFS_EROFS,
    MKFS_EXT4,
    MOUNT_COMPOSEFS,
    OVERLAY,
    Prepare,
    on_composefs,
    on_erofs,
    on_hosted_erofs,
    on_overlay,
)
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import BLOCK_BYTES

_NAME = "file"
_TIMEOUT_S = 20.0


@contextmanager
def _tree(setting: Setting) -> Iterator[Path]:
    """Make a directory with the source file, and nothing else."""
    tree = setting.new_directory("tree")
    os.link(setting.source_file(), tree / _NAME)
    yield tree


@contextmanager
def _mounted(
    prepare: Prepare, direct: bool, writable: bool, setting: Setting
) -> Iterator[Subject]:
    source = setting.shared("tree", lambda: _tree(setting))
    with ExitStack() as stack:
        mount = prepare(setting, source, stack)
        with mount(setting.new_directory("mnt")) as root:
            # Written data are on tmpfs.
            direct = direct and not (writable and setting.writable)
            yield Subject(root / _NAME, STAMPS, direct=direct, writable=writable)


@dataclass(frozen=True)
class _WritableVirtiofs:
    name: ClassVar[str] = "virtiofs"
    cure: ClassVar[str] = "run this in a VM: scripts/vm"

    def target(self) -> Path | None:
        """Return where a writable one is mounted."""
        mounts = (x for x in read_mountinfo() if x.fs_type == "virtiofs")
        return next((x.target for x in mounts if not x.read_only), None)

    def probe(self) -> str | None:
        return None if self.target() else "nothing of it is mounted writable here"


_VIRTIOFS = _WritableVirtiofs()


@peer("virtiofs", "file", "a file of the host through virtiofs", (_VIRTIOFS,))
def _virtiofs(setting: Setting) -> Iterator[Subject]:
    """The host's caching depends on how the guest was started."""
    with tempdir(parent=_VIRTIOFS.target()) as directory:
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


@dataclass(frozen=True)
class _FuseBy:
    """A way to reach a FUSE server; the probe tries it."""

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


def _peers() -> Iterator[Peer]:
    erofs: Sequence[Capability] = (ROOT, LOOP, EROFS, MKFS_EROFS)
    composed = (ROOT, EROFS, OVERLAY, MKCOMPOSEFS, MOUNT_COMPOSEFS)
    # NB: two of them read through the page cache even with O_DIRECT.
    for name, what, needs, prepare, direct in (
        ("erofs-loop", "EROFS on a loop device", erofs, on_erofs(False), True),
        (
            "erofs-loop-direct",
            "EROFS on a loop device with direct I/O",
            erofs,
            on_erofs(True),
            True,
        ),
        (
            "erofs-file",
            "EROFS on a file of ext4, no device",
            (*erofs, EXT4, MKFS_EXT4),
            on_hosted_erofs,
            False,
        ),
        (
            "overlay-erofs",
            "overlayfs, on EROFS on a loop device",
            (*erofs, OVERLAY),
            on_overlay(False),
            True,
        ),
        (
            "composefs",
            "composefs; its contents on tmpfs",
            composed,
            on_composefs,
            False,
        ),
    ):
        serving = partial(_mounted, prepare, direct, name == "overlay-erofs")
        yield Peer(name, "file", f"a file of {what}", needs, serving)
    for name, (how, description) in _STAND_INS.items():
        needs = (ROOT, FUSE, _FuseBy(how))
        yield Peer(name, "file", description, needs, partial(_stand_in, how))


PEERS = [*_peers(), _virtiofs]
