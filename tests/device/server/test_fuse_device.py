"""What only the fuse front end has: a file in a mount of its own, and a loop device."""

import ctypes
import errno
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.needs import Need
from support.processes import freeze

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FileSegment,
    MemsetSegment,
    ZeroSegment,
)
from btrfs_ublk.units import BLOCK_BYTES, MIB

pytestmark = pytest.mark.fuse

# linux/falloc.h
FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2

NOBODY = 65534
ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])


@pytest.fixture(autouse=True)
def fuse(need: Need) -> None:
    need(FUSE, LOOP)


def serve(description: Description, **options: Any) -> BlockServer:
    return BlockServer(description, front_end="fuse", **options)


@contextmanager
def server_alone(
    directory: Path, description: Description, *options: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server without an owner, and its ready line."""
    path = directory / "description.json"
    path.write_text(description.to_json())
    with subprocess.Popen(
        [helper_path(SERVER), "--front-end", "fuse", *options, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            line = server.stdout.readline()
            yield server, json.loads(line) if line else {}
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
                assert server.wait(30) == 0, server.stderr.read()
        finally:
            server.kill()


def test_nothing_is_mounted_where_anybody_sees_it() -> None:
    before = read_mountinfo()
    with serve(ZEROES) as server:
        assert read_mountinfo() == before
        loop = Path("/sys/block") / server.device.name / "loop"
        tag = process_ledger().entries()[0].tag
        assert (loop / "backing_file").read_text().strip() == f"/btrfs-ublk-{tag}"
        assert (loop / "dio").read_text().strip() == "1"


@pytest.mark.parametrize("read_only", [True, False])
def test_the_file_is_what_it_says(sparse_path: Path, read_only: bool) -> None:
    content = random.Random(4).randbytes(MIB)
    (sparse_path / "source").write_bytes(content)
    segment = FileSegment(
        offset=0, length=MIB, path=str(sparse_path / "source"), writable=not read_only
    )
    description = Description(MIB, [segment], read_only=read_only)
    with server_alone(sparse_path, description) as (_, ready):
        file = Path(ready["file"])
        status = file.stat()
        assert status.st_mode == 0o100400 if read_only else 0o100600
        assert (status.st_uid, status.st_size) == (os.geteuid(), MIB)
        assert status.st_blocks * 512 == MIB  # no holes
        assert read_direct(file, 0, MIB) == content
        # As of any file, reads end where it ends; as of a disk, they are of blocks.
        fd = os.open(file, os.O_RDONLY)
        assert os.pread(fd, 3 * BLOCK_BYTES, MIB - BLOCK_BYTES) == content[-4096:]
        assert os.pread(fd, BLOCK_BYTES, MIB) == b""
        with pytest.raises(OSError) as caught:
            os.pread(fd, 100, 0)
        assert caught.value.errno == errno.EINVAL
        assert os.lseek(fd, 5, os.SEEK_DATA) == 5
        assert os.lseek(fd, 5, os.SEEK_HOLE) == MIB
        assert os.fstatvfs(fd).f_bsize == BLOCK_BYTES
        os.close(fd)
        for change in (os.truncate, lambda path, _: os.unlink(path)):
            with pytest.raises(OSError):
                change(file, 4096)
        if read_only:
            with pytest.raises(OSError) as caught:
                os.open(file, os.O_RDWR)
            assert caught.value.errno in (errno.EACCES, errno.EROFS)
    assert (sparse_path / "source").read_bytes() == content


def test_writes_holes_and_what_is_refused(sparse_path: Path) -> None:
    source = sparse_path / "source"
    source.write_bytes(b"x" * MIB)
    segments = [
        FileSegment(offset=0, length=MIB, path=str(source), writable=True),
        ZeroSegment(offset=MIB, length=MIB),
    ]
    description = Description(2 * MIB, segments, read_only=False)
    with server_alone(sparse_path, description) as (_, ready):
        fd = os.open(ready["file"], os.O_RDWR)
        assert os.pwrite(fd, b"y" * 8192, 4096) == 8192
        os.fsync(fd)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int] * 2 + [ctypes.c_int64] * 2
        hole = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
        assert libc.fallocate(fd, hole, 16384, 4096) == 0
        # Preallocation means nothing here, and the other half takes no writes.
        assert libc.fallocate(fd, 0, 0, 4096) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP
        assert libc.fallocate(fd, hole, MIB, 4096) == -1
        for offset in (MIB, MIB - 4096, 2 * MIB):
            with pytest.raises(OSError):
                os.pwrite(fd, bytes(8192), offset)
        os.close(fd)
    expected = bytearray(b"x" * MIB)
    expected[4096:12288] = b"y" * 8192
    expected[16384:20480] = bytes(4096)
    # A write that fails may have changed what came before the place where it failed.
    assert source.read_bytes()[: MIB - 4096] == expected[: MIB - 4096]


def test_nobody_else_gets_at_it(sparse_path: Path) -> None:
    with server_alone(sparse_path, ZEROES) as (_, ready):
        done = subprocess.run(
            ["cat", ready["file"]], user=NOBODY, group=NOBODY, extra_groups=[]
        )
        assert done.returncode == 1


def test_a_thread_that_waits_for_a_file_does_not_hold_up_the_others(
    sparse_path: Path,
) -> None:
    """All but one rest; that one has to call another when it can take no more."""
    other, main = sparse_path / "other", sparse_path / "main"
    other.mkdir()
    main.mkdir()
    with server_alone(other, ZEROES) as (slow, slow_ready):
        segments = [
            FileSegment(offset=0, length=MIB, path=slow_ready["file"]),
            MemsetSegment(offset=MIB, length=MIB, byte=7),
        ]
        description = Description(2 * MIB, segments)
        options = ("--queues", "3", "--depth", "1")
        with ThreadPoolExecutor(2) as pool:
            with server_alone(main, description, *options) as (_, ready):
                file = Path(ready["file"])
                # The kernel polls a FUSE file, once, when io_uring reads it: in line.
                assert read_direct(file, 0, 4096) == bytes(4096)
                freeze(slow.pid)
                try:
                    waiting = pool.submit(read_direct, file, 0, 4096)
                    time.sleep(0.1)
                    for _ in range(20):
                        answer = pool.submit(read_direct, file, MIB, 4096)
                        assert answer.result(timeout=60) == b"\7" * 4096
                    assert not waiting.done()
                finally:
                    slow.send_signal(signal.SIGCONT)
                assert waiting.result(timeout=60) == bytes(4096)
