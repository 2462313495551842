"""The block server where there is ublk: bytes, refusals, what protects the host."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Need
from sanitized_build import SANITIZER_ENVIRONMENT

from btrfs_ublk.capabilities import UBLK
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.helpers import HELPERS_VARIABLE, SERVER, helper_path
from btrfs_ublk.process import ProcessIdentity
from btrfs_ublk.readers import READERS, read_direct
from btrfs_ublk.resources.mount import mounted
from btrfs_ublk.resources.ublk_devices import list_ublk_devices
from btrfs_ublk.resources.uevents import wait_until
from btrfs_ublk.seed.mega_extent import make_seed
from btrfs_ublk.server.block_server import BlockServer
from btrfs_ublk.server.description import (
    Description,
    ErrorSegment,
    FileSegment,
    MemsetSegment,
    PatternSegment,
    ZeroSegment,
)
from btrfs_ublk.units import BLOCK_BYTES, EIB, KIB, MIB, TIB

pytestmark = pytest.mark.ublk

ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])

# linux/fs.h, linux/falloc.h
BLKROGET = 0x125E
BLKDISCARD = 0x1277
BLKZEROOUT = 0x127F
# linux/sched.h: what PR_SET_IO_FLUSHER sets.
PF_IO_FLUSHER = 0x00080000 | 0x00100000


@pytest.fixture(autouse=True)
def ublk(need: Need) -> None:
    need(UBLK)


@pytest.fixture
def source(sparse_path: Path) -> Path:
    path = sparse_path / "source"
    path.write_bytes(random.Random(1).randbytes(2 * MIB))
    return path


def description_of_all_kinds(source: Path) -> Description:
    """Segments of odd lengths, so that most requests span some, up to 4 TiB."""
    lengths = [3, 1, 2, 5, 1, 7, 64, 33]
    kinds = [
        "file",
        "memset",
        "pattern",
        "zero",
        "file",
        "pattern",
        "memset",
        "pattern",
    ]
    offset = 0
    segments: list[MemsetSegment | FileSegment | PatternSegment | ZeroSegment] = []
    for kind, blocks in zip(kinds, lengths, strict=True):
        length = blocks * BLOCK_BYTES
        if kind == "file":
            segments.append(
                FileSegment(
                    offset=offset,
                    length=length,
                    path=str(source),
                    file_offset=offset + BLOCK_BYTES,
                )
            )
        elif kind == "memset":
            segments.append(MemsetSegment(offset=offset, length=length, byte=97))
        elif kind == "pattern":
            segments.append(PatternSegment(offset=offset, length=length, base=7))
        else:
            segments.append(ZeroSegment(offset=offset, length=length))
        offset += length
    rest = PatternSegment(offset=offset, length=4 * TIB - offset)
    return Description(4 * TIB, [*segments, rest])


def ranges(
    seed: int, limit: int, count: int, longest: int
) -> Iterator[tuple[int, int]]:
    source = random.Random(seed)
    for _ in range(count):
        length = source.randrange(1, longest)
        yield source.randrange(0, limit - length), length


@pytest.mark.parametrize("how", READERS)
def test_every_byte_is_as_described(source: Path, how: str) -> None:
    description = description_of_all_kinds(source)
    with BlockServer(description, queues=2, depth=8, max_io_bytes=64 * KIB) as server:
        device = server.device
        for offset, length in [
            *ranges(1, 120 * BLOCK_BYTES, 150, 40 * BLOCK_BYTES),
            *ranges(2, description.size, 20, 300 * KIB),
        ]:
            if how == "mmap" and offset + length > TIB:
                continue  # a device's mapping is one long range
            read = (
                READERS[how](device, offset, length)
                if how != "mmap"
                else (read_mapped_device(device, offset, length))
            )
            assert read == description.content(offset, length), (offset, length)
        assert server.stats()["errors"] == 0


def read_mapped_device(device: Path, offset: int, length: int) -> bytes:
    """Like readers.read_mapped(), for a file whose stat() tells no size."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    fd = os.open(device, os.O_RDONLY)
    try:
        size = offset + length - start
        with mmap.mmap(fd, size, prot=mmap.PROT_READ, offset=start) as memory:
            return memory[offset - start : size]
    finally:
        os.close(fd)


def test_the_server_under_sanitizers(
    source: Path, sanitized_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, ring, buffers and teardown of the front end itself."""
    monkeypatch.setenv(HELPERS_VARIABLE, str(sanitized_build / "csrc/tools"))
    # The server sees no /proc, which leak detection wants.
    monkeypatch.setenv("ASAN_OPTIONS", "exitcode=99:detect_leaks=0")
    monkeypatch.setenv("UBSAN_OPTIONS", SANITIZER_ENVIRONMENT["UBSAN_OPTIONS"])
    description = description_of_all_kinds(source)
    with BlockServer(description, queues=2, depth=8, max_io_bytes=64 * KIB) as server:
        for offset, length in ranges(4, 120 * BLOCK_BYTES, 60, 40 * BLOCK_BYTES):
            read = read_direct(server.device, offset, length)
            assert read == description.content(offset, length)
        os.truncate(source, 0)
        with pytest.raises(OSError):
            read_direct(server.device, 0, 4 * MIB)
    assert server.final_stats is not None, "it did not end in good order"


def test_queues_serve_their_own_cpus(source: Path) -> None:
    """Readers on every CPU at once: a wrong descriptor of queue 1 would mix them up."""
    description = description_of_all_kinds(source)
    wrong: list[tuple[int, int]] = []

    def read_on(cpu: int, device: Path) -> None:
        os.sched_setaffinity(threading.get_native_id(), {cpu})
        for offset, length in ranges(cpu, description.size, 200, 16 * KIB):
            if read_direct(device, offset, length) != description.content(
                offset, length
            ):
                wrong.append((offset, length))

    cpus = sorted(os.sched_getaffinity(0))
    with BlockServer(description, queues=len(cpus), depth=4) as server:
        threads = [
            threading.Thread(target=read_on, args=(cpu, server.device)) for cpu in cpus
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_more_queues_than_cpus_are_cut_to_them() -> None:
    with BlockServer(ZEROES, queues=(os.cpu_count() or 1) + 2, depth=4) as server:
        assert device_record(server.device_id)["queues"] == os.cpu_count()
        assert read_direct(server.device, 0, 64 * KIB) == bytes(64 * KIB)


def test_the_largest_device() -> None:
    size = 7 * EIB
    with BlockServer(Description(size, [PatternSegment(offset=0, length=size)])) as it:
        for offset in (0, 4 * EIB + 12345 * BLOCK_BYTES, size - BLOCK_BYTES):
            expected = b"".join(
                word.to_bytes(8, "little")
                for word in range(offset, offset + BLOCK_BYTES, 8)
            )
            assert read_direct(it.device, offset, BLOCK_BYTES) == expected


def test_an_error_segment_gives_eio_and_nothing_else_does(source: Path) -> None:
    description = Description.filled(
        4 * MIB, [FileSegment(offset=MIB, length=MIB, path=str(source))]
    )
    with BlockServer(description) as server:
        assert read_direct(server.device, MIB, MIB) == description.content(MIB, MIB)
        for offset, length in ((0, 4096), (MIB - 4096, 8192), (2 * MIB - 4096, 8192)):
            with pytest.raises(OSError) as caught:
                read_direct(server.device, offset, length)
            assert caught.value.errno == errno.EIO
        assert read_direct(server.device, MIB, MIB) == description.content(MIB, MIB)
        assert server.stats()["kinds"]["error"]["errors"] >= 3


def test_a_file_that_shrinks_gives_eio(source: Path) -> None:
    description = Description(
        MIB, [FileSegment(offset=0, length=MIB, path=str(source))]
    )
    with BlockServer(description) as server:
        os.truncate(source, 64 * KIB + 10)
        assert len(read_direct(server.device, 0, 64 * KIB)) == 64 * KIB
        for offset in (64 * KIB, 512 * KIB):
            with pytest.raises(OSError) as caught:
                read_direct(server.device, offset, BLOCK_BYTES)
            assert caught.value.errno == errno.EIO


def test_a_read_only_device_cannot_be_written(source: Path) -> None:
    description = Description(
        MIB, [FileSegment(offset=0, length=MIB, path=str(source))]
    )
    before = source.read_bytes()
    with BlockServer(description) as server:
        fd = os.open(server.device, os.O_RDONLY)
        try:
            answer = fcntl.ioctl(fd, BLKROGET, bytes(4))
            assert int.from_bytes(answer, sys.byteorder) == 1
        finally:
            os.close(fd)
        with pytest.raises(OSError):
            with server.device.open("r+b", buffering=0) as file:
                file.write(bytes(BLOCK_BYTES))
                os.fsync(file.fileno())
    assert source.read_bytes() == before


def test_writes_reach_a_writable_file(source: Path) -> None:
    before = source.read_bytes()
    description = Description(
        2 * MIB,
        [
            FileSegment(offset=0, length=MIB, path=str(source), writable=True),
            PatternSegment(offset=MIB, length=MIB),
        ],
        read_only=False,
    )
    with BlockServer(description) as server:
        with server.device.open("r+b", buffering=0) as file:
            file.seek(8 * KIB)
            file.write(b"w" * 8 * KIB)
            os.fsync(file.fileno())
            for request, offset in ((BLKDISCARD, 32 * KIB), (BLKZEROOUT, 64 * KIB)):
                span = offset.to_bytes(8, sys.byteorder)
                length = (4 * KIB).to_bytes(8, sys.byteorder)
                fcntl.ioctl(file.fileno(), request, span + length)
        # The half that only the server defines takes no writes.
        with pytest.raises(OSError):
            with server.device.open("r+b", buffering=0) as file:
                file.seek(MIB)
                file.write(bytes(BLOCK_BYTES))
                os.fsync(file.fileno())
    expected = bytearray(before)
    expected[8 * KIB : 16 * KIB] = b"w" * 8 * KIB
    expected[32 * KIB : 36 * KIB] = bytes(4 * KIB)
    expected[64 * KIB : 68 * KIB] = bytes(4 * KIB)
    assert source.read_bytes() == expected


def test_the_server_cannot_wait_for_itself() -> None:
    """A mount namespace with nothing in it, memory locked, I/O threads as flushers."""
    with BlockServer(ZEROES, queues=2) as server:
        process = Path(f"/proc/{server.pid}")
        assert os.readlink(process / "ns/mnt") != os.readlink("/proc/self/ns/mnt")
        mounts = (process / "mounts").read_text().splitlines()
        assert [line.split()[1:3] for line in mounts] == [["/", "tmpfs"]]
        status = dict(
            line.split(":\t", 1)
            for line in (process / "status").read_text().splitlines()
        )
        assert int(status["VmLck"].split()[0]) >= int(status["VmRSS"].split()[0]) // 2
        flags = [
            int((task / "stat").read_text().rpartition(")")[2].split()[6])
            for task in (process / "task").iterdir()
        ]
        flushers = [flag & PF_IO_FLUSHER == PF_IO_FLUSHER for flag in flags]
        assert sum(flushers) == 2, "both queue threads, and only they"


def test_unmounting_elsewhere_is_not_held_up(sparse_path: Path) -> None:
    """A server that starts while something is mounted does not keep it mounted."""
    seed = make_seed(
        sparse_path / "seed", virtual_data_size=64 * MIB, metadata_only=True
    )
    target = sparse_path / "mnt"
    target.mkdir()
    with BlockServer(seed.description([])) as first:
        with mounted(first.device, target, read_only=True):
            second = BlockServer(ZEROES)
            second.__enter__()
        try:
            # The superblock is gone: the device can be had exclusively.
            os.close(os.open(first.device, os.O_RDONLY | os.O_EXCL))
        finally:
            second.stop()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_server_of_its_own_ends_cleanly_on_a_signal(
    sparse_path: Path, signum: signal.Signals
) -> None:
    path = sparse_path / "description.json"
    path.write_text(ZEROES.to_json())
    process = subprocess.Popen(
        [helper_path(SERVER), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        assert read_direct(Path(ready["device"]), 0, 4096) == bytes(4096)
        process.send_signal(signum)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
    wait_until(lambda: not list_ublk_devices(), timeout_s=10, what="no device")


def test_the_device_goes_when_its_owner_is_killed() -> None:
    program = f"""
        import signal, sys
        from btrfs_ublk.server.block_server import BlockServer
        from btrfs_ublk.server.description import Description
        with BlockServer(Description.from_json({ZEROES.to_json()!r})) as server:
            print(server.pid, flush=True)
            signal.pause()
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    server = ProcessIdentity.of(int(owner.stdout.readline()))
    owner.kill()
    owner.wait(30)
    owner.stdout.close()
    wait_until(lambda: not server.is_alive(), timeout_s=30, what="no server")
    wait_until(lambda: not list_ublk_devices(), timeout_s=10, what="no device")
    subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", "gc"], check=True, timeout=60
    )


def test_a_mounted_device_outlives_its_owner(sparse_path: Path) -> None:
    """It is served until it is unmounted; pulled away, btrfs would turn read-only."""
    seed = make_seed(
        sparse_path / "seed", virtual_data_size=64 * MIB, metadata_only=True
    )
    target = sparse_path / "mnt"
    target.mkdir()
    description = seed.description([PatternSegment(offset=0, length=64 * MIB)])
    program = f"""
        import signal
        from btrfs_ublk.server.block_server import BlockServer
        from btrfs_ublk.server.description import Description
        with BlockServer(Description.from_json({description.to_json()!r})) as server:
            print(server.pid, server.device, flush=True)
            signal.pause()
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pid, device = owner.stdout.readline().split()
    server = ProcessIdentity.of(int(pid))
    with mounted(Path(device), target, read_only=True):
        owner.kill()
        owner.wait(30)
        owner.stdout.close()
        file = target / seed.virtual_data.filename
        for offset in range(0, 64 * MIB, 4 * MIB):
            time.sleep(0.1)
            expected = PatternSegment(offset=0, length=64 * MIB).content(offset, 4096)
            assert read_direct(file, offset, 4096) == expected
        assert server.is_alive()
    wait_until(lambda: not server.is_alive(), timeout_s=30, what="no server")
    wait_until(lambda: not list_ublk_devices(), timeout_s=10, what="no device")
    subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", "gc"], check=True, timeout=60
    )


def test_a_mounted_device_is_not_taken_down(sparse_path: Path) -> None:
    seed = make_seed(
        sparse_path / "seed", virtual_data_size=64 * MIB, metadata_only=True
    )
    target = sparse_path / "mnt"
    target.mkdir()
    contents = [PatternSegment(offset=0, length=64 * MIB)]
    server = BlockServer(seed.description(contents))
    server.__enter__()
    try:
        with mounted(server.device, target, read_only=True):
            with pytest.raises(LeftoverError, match=str(target)):
                server.stop()
            tag = device_record(server.device_id)["tag"]
            done = run_server("--delete-device", str(server.device_id), "--tag", tag)
            assert done.returncode == 1
            assert "mounted or in use" in done.stderr
            # It still serves.
            file = target / seed.virtual_data.filename
            assert read_direct(file, 4096, 16) == contents[0].content(4096, 16)
    finally:
        server.stop()


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper_path(SERVER), *arguments], capture_output=True, text=True, timeout=60
    )


def device_record(device_id: int) -> dict[str, Any]:
    done = run_server("--list-devices")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return next(record for record in records if record["id"] == device_id)


def test_a_device_is_deleted_by_its_tag_only() -> None:
    with BlockServer(ZEROES) as server:
        record = device_record(server.device_id)
        assert record["state"] == "live"
        assert record["server_pid"] == server.pid
        wrong = f"{int(record['tag'], 16) ^ 1:016x}"
        done = run_server("--delete-device", str(server.device_id), "--tag", wrong)
        assert done.returncode == 1
        assert "left alone" in done.stderr
        assert read_direct(server.device, 0, 4096) == bytes(4096)


def test_a_device_id_that_is_taken_is_refused(sparse_path: Path) -> None:
    path = sparse_path / "description.json"
    path.write_text(ZEROES.to_json())
    with BlockServer(ZEROES) as server:
        done = run_server("--id", str(server.device_id), str(path))
        assert done.returncode == 1
        assert "is taken" in done.stderr
        assert len(list_ublk_devices()) == 1


def test_a_missing_file_is_named_and_nothing_is_left(sparse_path: Path) -> None:
    missing = sparse_path / "missing"
    segment = FileSegment(offset=0, length=MIB, path=str(missing))
    with pytest.raises(BtrfsUblkError, match="missing.*No such file"):
        BlockServer(Description(MIB, [segment])).__enter__()
    missing.write_bytes(b"short")
    with pytest.raises(UsageError, match="has 5 bytes"):
        BlockServer(Description(MIB, [segment])).__enter__()
    gap = Description.filled(2 * MIB, [ErrorSegment(offset=0, length=MIB)])
    with BlockServer(gap) as server, pytest.raises(OSError):
        read_direct(server.device, MIB, BLOCK_BYTES)


def test_many_devices_side_by_side() -> None:
    servers = [
        BlockServer(
            Description(MIB, [MemsetSegment(offset=0, length=MIB, byte=byte)]),
            queues=1,
            depth=2,
            max_io_bytes=64 * KIB,
        )
        for byte in range(8)
    ]
    try:
        for server in servers:
            server.__enter__()
        for byte, server in enumerate(servers):
            assert read_direct(server.device, 0, MIB) == bytes([byte]) * MIB
    finally:
        for server in servers:
            server.stop()
