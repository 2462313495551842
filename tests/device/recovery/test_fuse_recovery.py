"""Servers of the fuse front end that are killed, and those that come after them.

Under verified reads of a clone on a mounted sprout; what is counted is wrong bytes and
errors that a reader sees.
"""

import errno
import json
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.fuse_servers import HOW, TIMEOUT_S, Readers, Servers, attached
from support.needs import Need
from support.processes import freeze

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.base.process import ProcessIdentity, run
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.kernel import clone_file, mounted
from btrfs_ublk.seed import make_seed
from btrfs_ublk.server import Description, FileSegment, PatternSegment, ZeroSegment
from btrfs_ublk.server.control import ControlError
from btrfs_ublk.server.fuse import attach_loop
from btrfs_ublk.server.fuse_connection import FuseConnection
from btrfs_ublk.units import BLOCK_BYTES, GIB, MIB
from btrfs_ublk.volume.sprout import sprout
from btrfs_ublk.volume.temporary import virtual_file_of

pytestmark = [pytest.mark.data, pytest.mark.fuse]

#: More than the tests can read twice, so that nearly all reads reach the server.
FILE_BYTES = 64 * GIB
ROUNDS = 8
ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])


@pytest.fixture(autouse=True)
def fuse(need: Need) -> None:
    need(FUSE, LOOP)


@dataclass
class Stage:
    """A sprout with a clone of pattern, on a first server."""

    servers: Servers
    ready: dict[str, Any]
    device: Path
    clone: Path

    @contextmanager
    def reading(self, how: str = "direct") -> Iterator[Readers]:
        readers = Readers(self.clone, how)
        try:
            yield readers
        finally:
            readers.kill()


@pytest.fixture
def stage(sparse_path: Path) -> Iterator[Stage]:
    seed = make_seed(
        sparse_path / "seed", virtual_data_size=FILE_BYTES, metadata_only=True
    )
    pattern = PatternSegment(offset=0, length=FILE_BYTES)
    servers = Servers(sparse_path, seed.description([pattern]))
    target = sparse_path / "mnt"
    target.mkdir()
    with ExitStack() as stack:
        stack.callback(servers.close)
        ready = servers.start("--recovery", "auto")
        device = stack.enter_context(attached(servers, ready))
        stack.enter_context(sprout(device, target, parent=sparse_path))
        clone = target / "clone"
        with virtual_file_of(seed, target) as virtual:
            clone_file(virtual, clone, source_offset=0, size_bytes=FILE_BYTES)
        # A commit that comes while nobody answers may be the end of the file system.
        run(["btrfs", "filesystem", "sync", target], timeout_s=TIMEOUT_S)
        yield Stage(servers, ready, device, clone)


@pytest.fixture
def kept(stage: Stage) -> Iterator[FuseConnection]:
    """The connection of the stage's server."""
    with stage.servers.keep(stage.ready) as connection:
        yield connection
        # Before the stage comes down: reads would wait for ever otherwise.


@contextmanager
def serving(
    directory: Path, description: Description = ZEROES, *options: str
) -> Iterator[tuple[Servers, dict[str, Any], ExitStack]]:
    """A first server that can be taken over, its ready line, and what ends before."""
    servers = Servers(directory, description)
    with ExitStack() as stack:
        stack.callback(servers.close)
        yield servers, servers.start("--recovery", "auto", *options), stack


class TestReissue:
    """Somebody keeps the connection: no reader sees an error."""

    @pytest.mark.parametrize("how", HOW)
    def test_killed_servers(self, stage: Stage, kept: FuseConnection, how: str) -> None:
        """Each second one was stopped before."""
        with stage.reading(how) as readers:
            for number in range(ROUNDS):
                readers.go_on()
                if number % 2:
                    freeze(stage.servers.pid)
                    time.sleep(0.05)
                stage.servers.kill()
                stage.servers.take_over(kept)
            readers.go_on()
            assert readers.must_be_content() > ROUNDS * 8

    def test_killed_in_the_midst_of_a_takeover(
        self, stage: Stage, kept: FuseConnection
    ) -> None:
        chances = random.Random(7)
        with stage.reading() as readers:
            readers.go_on()
            for _ in range(ROUNDS):
                stage.servers.kill()
                stage.servers.launch(*kept.arguments(), keep=kept.descriptors())
                time.sleep(chances.uniform(0, 0.03))
            stage.servers.kill()
            stage.servers.take_over(kept)
            readers.go_on()
            readers.must_be_content()

    def test_handed_over(
        self, sparse_path: Path, stage: Stage, kept: FuseConnection
    ) -> None:
        """As for a newer version of the server: it ends when its answers are out."""
        address = str(sparse_path / "socket")
        with socket.socket(socket.AF_UNIX) as listening, stage.reading() as readers:
            listening.bind(address)
            listening.listen()
            listen = ["--listen-fd", str(listening.fileno())]
            stage.servers.kill()
            for _ in range(5):
                stage.servers.take_over(kept, *listen, keep=[listening.fileno()])
                readers.go_on()
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(address)
                    client.sendall(b'{"request": "handover"}\n')
                    assert json.loads(client.recv(4096))["reply"] == "handover"
                    assert stage.servers.running.wait(TIMEOUT_S) == 4
                stage.servers.kill()
            stage.servers.take_over(kept)
            readers.go_on()
            readers.must_be_content()

    def test_a_read_that_signals_interrupt(self, sparse_path: Path) -> None:
        """FUSE_INTERRUPT, of requests that a server had taken when it died."""
        pattern = PatternSegment(offset=0, length=MIB)
        script = (
            "import os, signal, sys\n"
            "signal.signal(signal.SIGALRM, lambda *_: None)\n"
            "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)\n"
            "for offset in range(0, 1 << 20, 4096):\n"
            "    os.write(1, os.pread(fd, 4096, offset))\n"
            "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        )
        described = Description(MIB, [pattern])
        with serving(sparse_path, described) as (servers, ready, stack):
            kept = stack.enter_context(servers.keep(ready))
            reader = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", script, ready["file"]],
                    stdout=subprocess.PIPE,
                )
            )
            stack.callback(reader.kill)
            assert reader.stdout is not None
            content = os.read(reader.stdout.fileno(), 1 << 16)
            for _ in range(10):
                freeze(servers.pid)
                time.sleep(0.03)
                servers.kill()
                servers.take_over(kept)
                # Its pipe was full, or it waited for the one who died.
                content += os.read(reader.stdout.fileno(), 1 << 16)
            content += reader.stdout.read()
            assert reader.wait(TIMEOUT_S) == 0
            assert content == pattern.content(0, MIB)

    def test_many_writes_at_once(self, sparse_path: Path) -> None:
        """Each block is written again and again: an older write must not come back."""
        source = sparse_path / "source"
        source.write_bytes(bytes(MIB))
        segment = FileSegment(offset=0, length=MIB, path=str(source), writable=True)
        stop = threading.Event()

        def write(file: Path, number: int) -> int:
            """To a block of its own. Returns what was written last."""
            fd = os.open(file, os.O_RDWR)
            offset, count = number * BLOCK_BYTES, 0
            while not stop.is_set():
                count += 1
                block = struct.pack("<QQ", number, count) * (BLOCK_BYTES // 16)
                assert os.pwrite(fd, block, offset) == BLOCK_BYTES
                if count % 4 == 0:
                    assert os.pread(fd, BLOCK_BYTES, offset) == block
            os.close(fd)
            return count

        chances = random.Random(9)
        with serving(
            sparse_path, Description(MIB, [segment], read_only=False), "--queues", "2"
        ) as (servers, ready, stack):
            file = stack.enter_context(open(ready["file"], "rb", buffering=0))
            again = Path(f"/proc/self/fd/{file.fileno()}")
            kept = stack.enter_context(servers.keep(ready))
            with ThreadPoolExecutor(16) as pool:
                writing = [pool.submit(write, again, i) for i in range(16)]
                for number in range(ROUNDS):
                    time.sleep(chances.uniform(0, 0.05))
                    servers.kill()
                    if number % 3 == 0:
                        servers.launch(*kept.arguments(), keep=kept.descriptors())
                        time.sleep(chances.uniform(0, 0.03))
                        servers.kill()
                    servers.take_over(kept)
                stop.set()
                last = [future.result(TIMEOUT_S) for future in writing]
            assert min(last) > 0
            content = source.read_bytes()
        for number, count in enumerate(last):
            block = content[number * BLOCK_BYTES :][:BLOCK_BYTES]
            assert block == struct.pack("<QQ", number, count) * (BLOCK_BYTES // 16)

    @pytest.mark.parametrize("executed", [False, True])
    def test_a_write_that_was_left(self, sparse_path: Path, executed: bool) -> None:
        """What was carried out is not carried out again: others may have followed."""
        source = sparse_path / "source"
        source.write_bytes(bytes(MIB))
        segment = FileSegment(offset=0, length=MIB, path=str(source), writable=True)
        # struct fuse_in_header, struct fuse_write_in
        size = 80 + BLOCK_BYTES
        request = struct.pack("<IIQQIIIHH", size, 16, 1 << 60, 2, 0, 0, 0, 0, 0)
        request += struct.pack("<QQIIQII", 0, 8 * BLOCK_BYTES, BLOCK_BYTES, 0, 0, 0, 0)
        written = b"written" * 512 + bytes(512)
        with serving(
            sparse_path, Description(MIB, [segment], read_only=False), "--queues", "1"
        ) as (servers, ready, stack):
            kept = stack.enter_context(servers.keep(ready))
            servers.kill()
            # struct fuse_record: the first one, behind the page of sizes.
            journal = kept.descriptors()[-1]
            at = mmap.PAGESIZE
            os.pwrite(journal, struct.pack("<Ii", executed, 0), at)
            os.pwrite(journal, request + written, at + BLOCK_BYTES - 80)
            ready = servers.take_over(kept)
            # Nobody waits for its answer. This comes later, as there is one thread.
            first = read_direct(Path(ready["file"]), 0, BLOCK_BYTES)
            assert first == bytes(BLOCK_BYTES)
            content = source.read_bytes()[8 * BLOCK_BYTES :][:BLOCK_BYTES]
            assert content == (bytes(BLOCK_BYTES) if executed else written)
            assert os.pread(journal, 4, at) == bytes(4)

    def test_the_end_of_who_keeps_it_is_the_end(self, sparse_path: Path) -> None:
        with serving(sparse_path) as (servers, ready, stack):
            file = stack.enter_context(open(ready["file"], "rb", buffering=0))
            with servers.keep(ready):
                servers.kill()
            with pytest.raises(OSError) as caught:
                file.read(BLOCK_BYTES)
            assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)

    def test_a_file_that_was_open_before(self, sparse_path: Path) -> None:
        """Nobody tells the new server of it; it is served until it is closed."""
        with serving(sparse_path) as (servers, ready, stack):
            with open(ready["file"], "rb", buffering=0) as file:
                kept = stack.enter_context(servers.keep(ready))
                servers.kill()
                again = servers.take_over(kept)
                server = servers.running
                server.send_signal(signal.SIGTERM)
                with pytest.raises(subprocess.TimeoutExpired):
                    server.wait(0.5)
                # And it can be opened once more.
                content = read_direct(Path(again["file"]), 0, BLOCK_BYTES)
                assert content == file.read(BLOCK_BYTES) == bytes(BLOCK_BYTES)
            assert server.wait(TIMEOUT_S) == 0

    def test_one_that_cannot_say_that_it_took_over(self, sparse_path: Path) -> None:
        """It leaves the file as it was, and does not wait for who reads it."""
        with serving(sparse_path) as (servers, ready, stack):
            file = stack.enter_context(open(ready["file"], "rb", buffering=0))
            kept = stack.enter_context(servers.keep(ready))
            servers.kill()
            with open("/dev/full", "wb") as full:
                server = servers.launch(
                    *("--recovery", "auto", *kept.arguments()),
                    keep=kept.descriptors(),
                    stdout=full.fileno(),
                )
            assert server.wait(TIMEOUT_S) == 1
            assert "--recover-fds takes it over" in servers.errors()
            servers.take_over(kept)
            assert file.read(BLOCK_BYTES) == bytes(BLOCK_BYTES)

    def test_under_sanitizers(self, sparse_path: Path, sanitized_servers: None) -> None:
        with serving(sparse_path) as (servers, ready, stack):
            with open(ready["file"], "rb", buffering=0) as file:
                kept = stack.enter_context(servers.keep(ready))
                for _ in range(3):
                    servers.kill()
                    servers.take_over(kept)
                    assert file.read(BLOCK_BYTES) == bytes(BLOCK_BYTES)
            server = servers.running
            server.send_signal(signal.SIGTERM)
            assert server.wait(TIMEOUT_S) == 0, servers.errors()


class TestNoRecovery:
    def test_it_is_not_kept_where_nobody_asked(self, sparse_path: Path) -> None:
        servers = Servers(sparse_path, ZEROES)
        with ExitStack() as stack:
            stack.callback(servers.close)
            first = servers.start()
            with pytest.raises(ControlError, match="cannot be kept"):
                FuseConnection.of_server(first, ProcessIdentity.of(servers.pid))
            with pytest.raises(ControlError, match=f"has {MIB} bytes, not {2 * MIB}"):
                attach_loop(first, servers.tag, size_bytes=2 * MIB, read_only=True)


class TestRefusals:

    @pytest.mark.parametrize(
        ("case", "message"),
        [
            ("ended", "the FUSE connection has ended"),
            ("size", f"has {MIB} bytes, the description {2 * MIB}"),
            ("device", "is not /dev/fuse"),
            ("journal", "is not the journal of a server with 1 queues"),
        ],
    )
    def test_what_cannot_be_taken_over(
        self, sparse_path: Path, case: str, message: str
    ) -> None:
        with serving(sparse_path) as (servers, ready, stack):
            number = os.minor(os.stat(ready["file"]).st_dev)
            kept = stack.enter_context(servers.keep(ready))
            keep, arguments = kept.descriptors(), kept.arguments()
            servers.kill()
            if case == "size":
                servers.describe(
                    Description(2 * MIB, [ZeroSegment(offset=0, length=2 * MIB)])
                )
            elif case == "device":
                arguments[-1] = ",".join(map(str, [keep[0], *keep]))
            elif case == "journal":
                other = os.memfd_create("other")
                stack.callback(os.close, other)
                keep = [*keep[:2], keep[2], other]
                arguments[-1] = ",".join(map(str, keep))
            else:
                control = sparse_path / "connections"
                control.mkdir()
                with mounted("none", control, fs_type="fusectl"):
                    (control / str(number) / "abort").write_text("1")
            assert kept.has_ended() == (case == "ended")
            assert servers.start(*arguments, keep=keep) == {}
            servers.close()
            assert message in servers.errors()
