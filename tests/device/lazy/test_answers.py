"""Reads of lazy segments that the fetcher answers itself, over the FUSE connection of
the thread that has received them: while servers are killed and replaced, and where
there are fewer records than readers.
"""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.fuse_servers import TIMEOUT_S, Servers
from support.needs import Need
from support.shells import VirtualData, root_of, units_of
from support.waiting import wait_until
from support.web_servers import (
    ORIGIN_BYTES,
    ORIGIN_DATA,
    ORIGIN_UNIT,
    ORIGIN_UNITS,
    Origin,
    origin_source,
    scripted_server,
)

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.server import Description, LazySegment
from btrfs_ublk.units import BLOCK_BYTES

pytestmark = [pytest.mark.data, pytest.mark.fuse]

READERS = 16
FEW = ("--queues", "1", "--depth", "2")


@pytest.fixture
def origin(need: Need) -> Iterator[Origin]:
    need(FUSE, LOOP)
    origin = Origin()
    yield origin
    origin.go_on.set()


@pytest.fixture
def description(
    sanitized_build: Path, sparse_path: Path, origin: Origin
) -> Iterator[Description]:
    """A source of the origin, with digests and without a cache."""
    with scripted_server(origin) as server:
        source = origin_source(server.url())
        units = units_of(ORIGIN_DATA, ORIGIN_UNIT)
        root = root_of(units, size_bytes=ORIGIN_BYTES, unit_bytes=ORIGIN_UNIT)
        virtual = VirtualData(sanitized_build, sparse_path, ORIGIN_BYTES)
        virtual.add(source | {"root": root}, ORIGIN_DATA, 0)
        segment = LazySegment(offset=0, length=ORIGIN_BYTES, map=str(virtual.map))
        yield Description(ORIGIN_BYTES, [segment])
        origin.go_on.set()


@pytest.fixture
def servers(
    sanitized_servers: None, sparse_path: Path, description: Description
) -> Iterator[Servers]:
    made = Servers(sparse_path, description)
    yield made
    made.close()


@contextmanager
def reading(path: str) -> Iterator[dict[int, Future[bytes]]]:
    """Reads of a block each, of as many units, by offset."""
    blocks = ORIGIN_UNIT // BLOCK_BYTES
    at = [unit * ORIGIN_UNIT + unit % blocks * BLOCK_BYTES for unit in range(READERS)]
    fd = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(READERS) as pool:
            yield {each: pool.submit(os.pread, fd, BLOCK_BYTES, each) for each in at}
    finally:
        os.close(fd)


def must_be_right(reads: dict[int, Future[bytes]]) -> None:
    for offset, read in reads.items():
        found = read.result(timeout=TIMEOUT_S)
        assert found == ORIGIN_DATA[offset : offset + BLOCK_BYTES], offset


@pytest.mark.parametrize("options", [(), FEW])
def test_a_killed_server_leaves_its_reads_to_the_next(
    servers: Servers, origin: Origin, options: Sequence[str]
) -> None:
    origin.held_units = ORIGIN_UNITS
    with ExitStack() as stack:
        ready = servers.start("--recovery", "auto", *options)
        kept = stack.enter_context(servers.keep(ready))
        stack.callback(origin.go_on.set)
        reads = stack.enter_context(reading(ready["file"]))
        for _ in range(3):
            before = len(origin.asked)
            wait_until(lambda before=before: len(origin.asked) > before)
            servers.kill()
            servers.take_over(kept)
        origin.go_on.set()
        must_be_right(reads)


@pytest.mark.parametrize("options", [(), FEW])
def test_a_server_that_leaves_answers_first(
    servers: Servers, sparse_path: Path, origin: Origin, options: Sequence[str]
) -> None:
    """What it has received, it waits for; the rest is the next one's."""
    origin.held_units = ORIGIN_UNITS
    address = str(sparse_path / "socket")
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(address)
        listening.listen()
        listen = ["--listen-fd", str(listening.fileno())]
        ready = servers.start(
            *("--recovery", "auto", *listen, *options), keep=[listening.fileno()]
        )
        kept = stack.enter_context(servers.keep(ready))
        stack.callback(origin.go_on.set)
        reads = stack.enter_context(reading(ready["file"]))
        wait_until(lambda: bool(origin.asked))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            client.sendall(b'{"request": "handover"}\n')
            assert json.loads(client.recv(4096))["reply"] == "handover"
            assert servers.running.poll() is None
            origin.go_on.set()
            assert servers.running.wait(TIMEOUT_S) == 4, servers.errors()
        servers.kill()
        servers.take_over(kept)
        must_be_right(reads)


def test_a_server_that_is_stopped_fails_them(servers: Servers, origin: Origin) -> None:
    origin.held_units = ORIGIN_UNITS
    with ExitStack() as stack:
        ready = servers.start()
        stack.callback(origin.go_on.set)
        reads = stack.enter_context(reading(ready["file"]))
        wait_until(lambda: bool(origin.asked))
        servers.running.terminate()
        wait_until(lambda: "the device is in use" in servers.errors())
        servers.running.terminate()
        for read in reads.values():
            assert isinstance(read.exception(timeout=TIMEOUT_S), OSError)
        origin.go_on.set()
        assert servers.running.wait(TIMEOUT_S) == 0, servers.errors()


def test_fewer_records_than_readers(servers: Servers) -> None:
    """A thread that has lent all its records waits for them."""
    ready = servers.start(*FEW)
    for _ in range(3):
        with reading(ready["file"]) as reads:
            must_be_right(reads)
