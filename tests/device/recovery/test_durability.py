"""What has to be durable reaches the file of a segment as such, on every front end: the
kernel's own trace of a btrfs file system says what was synced.
"""

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.devices import new_btrfs
from support.needs import Need, Serve, inapplicable

from btrfs_ublk.base.capabilities import BTRFS, MKFS_BTRFS
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.kernel import mounted
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.server import BlockServer, Description, FileSegment, ZeroSegment
from btrfs_ublk.units import BLOCK_BYTES, MIB

pytestmark = pytest.mark.data

_EVENT = "events/btrfs/btrfs_sync_file/enable"


@pytest.fixture
def traces(need: Need, sparse_path: Path) -> Iterator[Path]:
    """A place of our own among the kernel's traces; gone with what it recorded."""
    need(MKFS_BTRFS, BTRFS)  # the module brings its events along
    there = [x.target for x in read_mountinfo() if x.fs_type == "tracefs"]
    if not there and "tracefs" not in Path("/proc/filesystems").read_text():
        inapplicable("this kernel has no traces (CONFIG_TRACING)")
    target = sparse_path / "tracefs"
    target.mkdir()
    with mounted("tracefs", target, fs_type="tracefs"):
        instance = target / "instances" / f"btrfs-ublk-{os.getpid()}"
        instance.mkdir()
        try:
            if not (instance / _EVENT).exists():
                inapplicable("this kernel traces no file systems")
            (instance / _EVENT).write_text("1")
            yield instance
            (instance / _EVENT).write_text("0")
        finally:
            instance.rmdir()


@pytest.fixture
def on_btrfs(sparse_path: Path) -> Iterator[Path]:
    """A directory in a file system that is nobody else's."""
    with new_btrfs(sparse_path, size_bytes=256 * MIB) as mount:
        yield mount


@dataclass
class _Seen:
    """In a while: what the server was asked for, and how often its file was synced."""

    writes: int = 0
    flushes: int = 0
    syncs: int = 0


@contextmanager
def _watching(server: BlockServer, file: Path, traces: Path) -> Iterator[_Seen]:
    (traces / "trace").write_text("")
    before = server.stats().kinds["file"]
    seen = _Seen()
    yield seen
    after = server.stats().kinds["file"]
    seen.writes = after.writes - before.writes
    seen.flushes = after.flushes - before.flushes
    event = re.compile(rf"btrfs_sync_file: .* ino={file.stat().st_ino} ")
    seen.syncs = len(event.findall((traces / "trace").read_text()))


@pytest.mark.gate_ublk
def test_what_has_to_be_durable_is_synced(
    serve: Serve, on_btrfs: Path, traces: Path
) -> None:
    path = on_btrfs / "file"
    path.write_bytes(bytes(MIB))
    description = Description(
        2 * MIB,
        [
            FileSegment(offset=0, length=MIB, path=str(path), writable=True),
            ZeroSegment(offset=MIB, length=MIB),
        ],
        read_only=False,
    )
    block = mmap.mmap(-1, BLOCK_BYTES)  # O_DIRECT wants it aligned
    with serve(description) as server:
        fd = os.open(server.device, os.O_RDWR | os.O_DIRECT)
        try:
            with _watching(server, path, traces) as plain:
                block[:] = b"1" * BLOCK_BYTES
                os.pwritev(fd, [block], 0)
                read_direct(server.device, 0, BLOCK_BYTES)
            assert (plain.writes, plain.flushes, plain.syncs) == (1, 0, 0)
            with _watching(server, path, traces) as flushed:
                os.fsync(fd)
            assert flushed.writes == 0 and flushed.syncs == flushed.flushes == 1
            with _watching(server, path, traces) as durable:
                block[:] = b"2" * BLOCK_BYTES
                os.pwritev(fd, [block], BLOCK_BYTES, os.RWF_DSYNC)
            assert durable.writes == 1
            # ublk has FUA: the write itself is synced. A loop device flushes after it.
            is_ublk = server.front_end == "ublk"
            assert durable.syncs == durable.flushes + is_ublk >= 1
        finally:
            os.close(fd)
    assert path.read_bytes()[: 2 * BLOCK_BYTES] == b"1" * 4096 + b"2" * 4096
