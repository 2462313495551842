"""Lazy segments as devices, with each front end."""

import errno
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
from support.needs import Serve
from support.processes import freeze
from support.shells import BLOCK, UNIT, VirtualData
from support.waiting import wait_until

from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.server import (
    BlockServer,
    Description,
    LazySegment,
    LazyStats,
    PatternSegment,
)

SIZE = 128 * UNIT
#: Not at the start: Linux before 7.0 looks there for partitions, and would wait.
SLOW_AT = 64 * UNIT


@pytest.fixture
def virtual(
    sanitized_build: Path, sanitized_helpers: None, sparse_path: Path
) -> VirtualData:
    return VirtualData(sanitized_build, sparse_path, SIZE)


def describe(virtual: VirtualData, *, cached: bool = True, **keys: Any) -> Description:
    cache = str(virtual.directory / "cache") if cached else None
    segment = LazySegment(
        offset=0, length=SIZE, map=str(virtual.map), cache=cache, **keys
    )
    return Description(SIZE, [segment])


def read(path: Path, offset: int, length: int) -> bytes | int:
    try:
        return read_direct(path, offset, length)
    except OSError as error:
        assert error.errno is not None
        return error.errno


def stats_of(server: BlockServer) -> LazyStats:
    return server.stats().lazy[0]


def wait_for_readers(server: BlockServer, count: int) -> None:
    wait_until(lambda: stats_of(server).fetcher.reads_waiting >= count)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def slow_file() -> Iterator[BlockServer]:
    """A file (of a FUSE front end) that does not answer while its server is stopped."""
    segment = PatternSegment(offset=0, length=SIZE)
    with BlockServer(Description(SIZE, [segment]), front_end="fuse") as server:
        yield server


@pytest.fixture
def slow_path(slow_file: BlockServer) -> Iterator[Path]:
    """A path of it. Its mount has none, and threads that fetch may not look into
    processes with more privileges than theirs: one without any holds it open.
    """
    assert slow_file.file is not None
    fd = os.open(slow_file.file, os.O_RDONLY)
    try:
        holder = subprocess.Popen(
            ["setpriv", "--inh-caps=-all", "--bounding-set=-all", "sleep", "600"],
            pass_fds=[fd],
        )
    finally:
        os.close(fd)
    yield Path(f"/proc/{holder.pid}/fd/{fd}")
    holder.kill()
    holder.wait()


def add_slow_file(virtual: VirtualData, slow_file: BlockServer, path: Path) -> None:
    """As 32 units."""
    data = slow_file.description.content(0, 32 * UNIT)
    source = {"size": len(data), "unit": UNIT, "kind": "file", "path": str(path)}
    virtual.add(source, data, SLOW_AT)


@pytest.mark.data
@pytest.mark.parametrize(
    "cached", [pytest.param(False, marks=pytest.mark.gate_ublk), True]
)
def test_byte_exact(serve: Serve, virtual: VirtualData, cached: bool) -> None:
    virtual.fill()
    draw = random.Random(5)
    for _ in range(2):
        with serve(describe(virtual, cached=cached)) as server:
            for _ in range(150):
                offset = draw.randrange(22 * UNIT // BLOCK) * BLOCK
                length = draw.choice([1, 1, 2, 16, 33, 100]) * BLOCK
                wanted = virtual.content(offset, length)
                assert read(server.device, offset, length) == wanted, (offset, length)
            stats = stats_of(server)
    assert stats.mappings == 21
    assert stats.fetcher.read_errors == 0
    assert not cached or stats.fetcher.units_fetched == 0


@pytest.mark.data
@pytest.mark.parametrize("options", [{"queues": 1}, {"queues": 2, "depth": 64}])
def test_64_readers_at_a_time(
    serve: Serve,
    virtual: VirtualData,
    slow_file: BlockServer,
    slow_path: Path,
    options: dict[str, int],
) -> None:
    add_slow_file(virtual, slow_file, slow_path)
    description = describe(virtual, deadline_s=60)
    with serve(description, **options) as server, ThreadPoolExecutor(64) as pool:
        offsets = [SLOW_AT + place * UNIT // 2 for place in range(64)]
        with stopped(slow_file.pid):
            reads = [pool.submit(read, server.device, at, BLOCK) for at in offsets]
            wait_for_readers(server, 64)
        for at, done in zip(offsets, reads, strict=True):
            assert done.result(60) == virtual.content(at, BLOCK)
        assert stats_of(server).fetcher.units_fetched == 32


def test_a_stop_does_not_wait_for_what_does_not_come(
    serve: Serve, virtual: VirtualData, slow_file: BlockServer, slow_path: Path
) -> None:
    add_slow_file(virtual, slow_file, slow_path)
    with ThreadPoolExecutor(1) as pool, stopped(slow_file.pid):
        with serve(describe(virtual, deadline_s=120)) as server:
            waiting = pool.submit(read, server.device, SLOW_AT, BLOCK)
            wait_for_readers(server, 1)
            started = time.monotonic()
            for _ in range(2):  # the second one insists: somebody has it open
                os.kill(server.pid, signal.SIGTERM)
                time.sleep(0.5)
            assert waiting.result(60) == errno.EIO
            assert time.monotonic() - started < 60


def test_a_file_system_that_hangs(
    serve: Serve, virtual: VirtualData, slow_file: BlockServer, slow_path: Path
) -> None:
    """It does not take all there is, by whatever path; and another mirror is asked."""
    data = slow_file.description.content(0, 8 * UNIT)
    good = virtual.directory / "good"
    good.write_bytes(data)
    slow = slow_path
    for number in range(4):
        path = f"{slow.parent}{'/.' * number}/{slow.name}"
        mirrors = [{"kind": "file", "path": each} for each in (path, str(good))]
        source = {"size": len(data), "unit": UNIT, "mirrors": mirrors}
        if number:
            source["mirrors"] = mirrors[:1]
        virtual.add(source, data, SLOW_AT + number * 8 * UNIT)
    others = range(SLOW_AT + 32 * UNIT, SLOW_AT + 48 * UNIT, UNIT)
    virtual.add_file("other", others.start, 16 * UNIT)
    with serve(describe(virtual, deadline_s=20), depth=64) as server:
        for number in range(1, 4):  # now it is known where they are
            assert read(server.device, SLOW_AT + number * 8 * UNIT, BLOCK) != errno.EIO
        with ThreadPoolExecutor(40) as pool, stopped(slow_file.pid):
            hung = [SLOW_AT + unit * UNIT for unit in range(8, 32) if unit % 8]
            for at in hung:
                pool.submit(read, server.device, at, BLOCK)
            wait_for_readers(server, len(hung))
            for at in others:
                assert read(server.device, at, BLOCK) == virtual.content(at, BLOCK)
            wait_for_readers(server, len(hung))  # none of them has failed meanwhile
            found = read(server.device, SLOW_AT, BLOCK)
            assert found == virtual.content(SLOW_AT, BLOCK)
