"""Every front end's device: bytes, errors, writes, and what protects the host.

One contract: each test runs with each front end that the kernel has.
"""

import errno
import fcntl
import mmap
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import small_seed
from support.needs import Serve

from btrfs_ublk.base.readers import READERS, read_direct
from btrfs_ublk.kernel import mounted
from btrfs_ublk.server import (
    Description,
    FileSegment,
    MemsetSegment,
    PatternSegment,
    Segment,
    ZeroSegment,
)
from btrfs_ublk.units import BLOCK_BYTES, EIB, KIB, MIB, TIB

pytestmark = pytest.mark.data

# linux/fs.h, linux/falloc.h
BLKROGET = 0x125E
BLKDISCARD = 0x1277
BLKZEROOUT = 0x127F
# linux/sched.h: what PR_SET_IO_FLUSHER sets.
PF_IO_FLUSHER = 0x00080000 | 0x00100000
# linux/capability.h
CAP_SYS_RESOURCE = 24


ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])


@pytest.fixture
def source(sparse_path: Path) -> Path:
    path = sparse_path / "source"
    path.write_bytes(random.Random(1).randbytes(2 * MIB))
    return path


def description_of_all_kinds(source: Path) -> Description:
    """Segments of odd lengths, so that most requests span some, up to 4 TiB."""
    kinds = "file memset pattern zero file pattern memset pattern".split()
    offset = 0
    segments: list[Segment] = []
    for kind, blocks in zip(kinds, [3, 1, 2, 5, 1, 7, 64, 33], strict=True):
        at = {"offset": offset, "length": blocks * BLOCK_BYTES}
        file = FileSegment(**at, path=str(source), file_offset=offset + BLOCK_BYTES)
        made: dict[str, Segment] = {
            "file": file,
            "memset": MemsetSegment(**at, byte=97),
            "pattern": PatternSegment(**at, base=7),
            "zero": ZeroSegment(**at),
        }
        segments.append(made[kind])
        offset = segments[-1].end
    rest = PatternSegment(offset=offset, length=4 * TIB - offset)
    return Description(4 * TIB, [*segments, rest])


def ranges(
    seed: int, limit: int, count: int, longest: int
) -> Iterator[tuple[int, int]]:
    source = random.Random(seed)
    for _ in range(count):
        length = source.randrange(1, longest)
        yield source.randrange(0, limit - length), length


@pytest.mark.gate_ublk
@pytest.mark.parametrize("how", READERS)
def test_every_byte_is_as_described(serve: Serve, source: Path, how: str) -> None:
    description = description_of_all_kinds(source)
    with serve(description, queues=2, depth=8, max_io_bytes=64 * KIB) as server:
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
        assert server.stats().errors == 0


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
    serve: Serve, source: Path, sanitized_servers: None
) -> None:
    """Threads, ring, buffers and teardown of the front end itself."""
    description = description_of_all_kinds(source)
    with serve(description, queues=2, depth=8, max_io_bytes=64 * KIB) as server:
        for offset, length in ranges(4, 120 * BLOCK_BYTES, 60, 40 * BLOCK_BYTES):
            read = read_direct(server.device, offset, length)
            assert read == description.content(offset, length)
        os.truncate(source, 0)
        with pytest.raises(OSError):
            read_direct(server.device, 0, 4 * MIB)
    assert server.final_stats is not None, "it did not end in good order"


def test_queues_serve_their_own_cpus(serve: Serve, source: Path) -> None:
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
    with serve(description, queues=len(cpus), depth=4) as server:
        threads = [
            threading.Thread(target=read_on, args=(cpu, server.device)) for cpu in cpus
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_the_largest_device(serve: Serve) -> None:
    size = 7 * EIB
    with serve(Description(size, [PatternSegment(offset=0, length=size)])) as it:
        for offset in (0, 4 * EIB + 12345 * BLOCK_BYTES, size - BLOCK_BYTES):
            expected = b"".join(
                word.to_bytes(8, "little")
                for word in range(offset, offset + BLOCK_BYTES, 8)
            )
            assert read_direct(it.device, offset, BLOCK_BYTES) == expected


@pytest.mark.gate_ublk
def test_an_error_segment_gives_eio_and_nothing_else_does(
    serve: Serve, source: Path
) -> None:
    description = Description.filled(
        4 * MIB, [FileSegment(offset=MIB, length=MIB, path=str(source))]
    )
    with serve(description) as server:
        assert read_direct(server.device, MIB, MIB) == description.content(MIB, MIB)
        for offset, length in ((0, 4096), (MIB - 4096, 8192), (2 * MIB - 4096, 8192)):
            with pytest.raises(OSError) as caught:
                read_direct(server.device, offset, length)
            assert caught.value.errno == errno.EIO
        assert read_direct(server.device, MIB, MIB) == description.content(MIB, MIB)
        assert server.stats().kinds["error"].errors >= 3


def test_a_file_that_shrinks_gives_eio(serve: Serve, source: Path) -> None:
    description = Description(
        MIB, [FileSegment(offset=0, length=MIB, path=str(source))]
    )
    with serve(description) as server:
        os.truncate(source, 64 * KIB + 10)
        assert len(read_direct(server.device, 0, 64 * KIB)) == 64 * KIB
        for offset in (64 * KIB, 512 * KIB):
            with pytest.raises(OSError) as caught:
                read_direct(server.device, offset, BLOCK_BYTES)
            assert caught.value.errno == errno.EIO


def test_a_read_only_device_cannot_be_written(serve: Serve, source: Path) -> None:
    description = Description(
        MIB, [FileSegment(offset=0, length=MIB, path=str(source))]
    )
    before = source.read_bytes()
    with serve(description) as server:
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


@pytest.mark.gate_ublk
def test_writes_reach_a_writable_file(serve: Serve, source: Path) -> None:
    before = source.read_bytes()
    description = Description(
        2 * MIB,
        [
            FileSegment(offset=0, length=MIB, path=str(source), writable=True),
            PatternSegment(offset=MIB, length=MIB),
        ],
        read_only=False,
    )
    with serve(description) as server:
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


@pytest.mark.gate_ublk
def test_what_writes_leave_in_a_buffer_is_never_read(
    serve: Serve, source: Path
) -> None:
    """Reads that need no data of their own come after writes with the same buffer."""
    description = Description(
        3 * MIB,
        [
            FileSegment(offset=0, length=MIB, path=str(source), writable=True),
            MemsetSegment(offset=MIB, length=MIB, byte=97),
            ZeroSegment(offset=2 * MIB, length=MIB),
        ],
        read_only=False,
    )
    dice = random.Random(3)
    with serve(description, queues=1, depth=1) as server:
        with server.device.open("r+b", buffering=0) as file:
            for _ in range(40):
                length = dice.randrange(1, 9) * BLOCK_BYTES
                for start in (0, MIB, 2 * MIB, MIB - 4 * BLOCK_BYTES):
                    read = read_direct(server.device, start, length)
                    wanted = description.content(start, length)
                    assert read == wanted, (start, length)
                file.seek(0)
                file.write(dice.randbytes(dice.randrange(1, 9) * BLOCK_BYTES))
                os.fsync(file.fileno())


def test_the_server_cannot_wait_for_itself(serve: Serve) -> None:
    """A mount namespace with nothing in it, memory locked, I/O threads as flushers."""
    with serve(ZEROES, queues=2) as server:
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
        # Where the capability is missing, as in some containers, there can be none.
        may = int(status["CapEff"], 16) >> CAP_SYS_RESOURCE & 1
        assert sum(flushers) == 2 * may, "both serving threads, and only they"


def test_unmounting_elsewhere_is_not_held_up(serve: Serve, sparse_path: Path) -> None:
    """A server that starts while something is mounted does not keep it mounted."""
    seed, target = small_seed(sparse_path)
    with serve(seed.description([])) as first:
        with mounted(first.device, target, read_only=True):
            second = serve(ZEROES)
            second.__enter__()
        try:
            # The superblock is gone: the device can be had exclusively.
            os.close(os.open(first.device, os.O_RDONLY | os.O_EXCL))
        finally:
            second.stop()
