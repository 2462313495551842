"""Zero copy between disks and readers, which has to be asked for: the same bytes."""

import json
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.devices import kill_server, reading, remove_all
from support.needs import Need, inapplicable, may_be_killed

from btrfs_ublk.base.capabilities import UBLK
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.device import DeviceOptions, add_device, upgrade_device
from btrfs_ublk.kernel import loop_device
from btrfs_ublk.server import (
    BlockServer,
    Description,
    ErrorSegment,
    FileSegment,
    MemsetSegment,
    PatternSegment,
    Segment,
    ZeroSegment,
)
from btrfs_ublk.server.features import kernel_features
from btrfs_ublk.units import BLOCK_BYTES, MIB

pytestmark = [pytest.mark.data, pytest.mark.ublk]

FEATURE = "auto-buf-reg"
AUTO_BUF_REG = 1 << 11
#: The driver takes memory that is aligned to so much; a loop device wants 512.
ALIGNMENT_BYTES = 4


def is_offered() -> bool:
    features = kernel_features()[0][0].features
    return any(x.name == FEATURE and x.offered for x in features)


@pytest.fixture
def zero_copy(need: Need) -> None:
    need(UBLK)
    if not is_offered():
        inapplicable(f"this driver has no {FEATURE}")


@dataclass
class Served:
    device: Path
    files: list[FileSegment]
    content: bytearray

    def random_range(self, dice: random.Random, most: int) -> tuple[int, int]:
        """Offset and length, of anywhere."""
        length = dice.randrange(1, most) * BLOCK_BYTES
        last = (len(self.content) - length) // BLOCK_BYTES
        return dice.randrange(last + 1) * BLOCK_BYTES, length


@contextmanager
def served(tmp: Path) -> Iterator[Served]:
    """All kinds side by side in odd lengths: a file in memory, disks with and without a
    page cache, and what is no file. The files are writable; an error is at the end.
    """
    dice = random.Random(3)
    length = 33 * BLOCK_BYTES
    paths = [tmp / f"file{number}" for number in range(3)]
    for path in paths:
        path.write_bytes(dice.randbytes(length))
    with loop_device(paths[1]) as cached, loop_device(paths[2]) as direct:
        segments: list[Segment] = []
        files = []
        at = 0
        for number, path in enumerate((paths[0], cached.path, direct.path)):
            files.append(
                FileSegment(
                    offset=at,
                    length=length,
                    path=str(path),
                    writable=True,
                    direct=number == 2,
                )
            )
            at = files[-1].end
            segments += [
                files[-1],
                MemsetSegment(offset=at, length=BLOCK_BYTES, byte=number + 1),
                PatternSegment(offset=at + BLOCK_BYTES, length=3 * BLOCK_BYTES),
                ZeroSegment(offset=at + 4 * BLOCK_BYTES, length=BLOCK_BYTES),
            ]
            at = segments[-1].end
        content = bytearray()
        for segment in segments:
            content += segment.content(segment.offset, segment.length)
        segments.append(ErrorSegment(offset=at, length=BLOCK_BYTES))
        description = Description(segments[-1].end, segments, read_only=False)
        with BlockServer(
            description, front_end="ublk", queues=1, depth=7, features=[FEATURE]
        ) as server:
            listed = subprocess.run(
                [helper_path(SERVER), "--list-devices"],
                capture_output=True,
                check=True,
                timeout=60,
            ).stdout
            (record,) = map(json.loads, listed.splitlines())
            assert record["flags"] & AUTO_BUF_REG
            yield Served(server.device, files, content)


@contextmanager
def opened(device: Path) -> Iterator[int]:
    fd = os.open(device, os.O_RDWR | os.O_DIRECT)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def memory(length: int, *, offset: int = 0) -> Iterator[memoryview]:
    """For O_DIRECT, ``offset`` bytes after the start of a page."""
    with (
        mmap.mmap(-1, offset + length) as pages,
        memoryview(pages) as view,
        view[offset:] as part,
    ):
        yield part


@pytest.mark.gate_ublk
def test_every_byte(sparse_path: Path, zero_copy: None) -> None:
    dice = random.Random(1)
    with served(sparse_path) as it:
        assert read_direct(it.device, 0, len(it.content)) == it.content
        for _ in range(100):
            at, length = it.random_range(dice, 20)
            read = read_direct(it.device, at, length)
            assert read == it.content[at : at + length], (at, length)
        with pytest.raises(OSError):
            read_direct(it.device, len(it.content), BLOCK_BYTES)
        with pytest.raises(OSError):
            read_direct(it.device, len(it.content) - BLOCK_BYTES, 2 * BLOCK_BYTES)


@pytest.mark.parametrize("alignment", [BLOCK_BYTES, ALIGNMENT_BYTES])
def test_writes(sparse_path: Path, zero_copy: None, alignment: int) -> None:
    dice = random.Random(2)
    with served(sparse_path) as it, opened(it.device) as fd:
        for number in range(90):
            file = it.files[number % 3]
            length = dice.randrange(1, 9) * BLOCK_BYTES
            last = (file.end - length) // BLOCK_BYTES
            at = dice.randrange(file.offset // BLOCK_BYTES, last + 1) * BLOCK_BYTES
            with memory(length, offset=alignment % BLOCK_BYTES) as data:
                data[:] = dice.randbytes(length)
                flags = os.RWF_DSYNC if dice.randrange(3) == 0 else 0
                assert os.pwritev(fd, [data], at, flags) == length
                it.content[at : at + length] = data
            at, length = it.random_range(dice, 9)
            read = read_direct(it.device, at, length)
            assert read == it.content[at : at + length], number
        os.fsync(fd)
        assert read_direct(it.device, 0, len(it.content)) == it.content


@pytest.mark.parametrize("kind", ["disk", "pattern"])
def test_servers_die_and_are_replaced(
    sparse_path: Path, zero_copy: None, kind: str
) -> None:
    """What is in flight is read into the readers' memory, by the disk or by us."""
    may_be_killed("ublk")
    pattern = PatternSegment(offset=0, length=64 * MIB)
    options = DeviceOptions(front_end="ublk", queues=1, depth=8, features=[FEATURE])
    file = sparse_path / "pattern"
    file.write_bytes(pattern.content(0, pattern.length))
    with loop_device(file, read_only=True) as disk:
        segment = FileSegment(
            offset=0, length=64 * MIB, path=str(disk.path), direct=True
        )
        description = Description(64 * MIB, [segment if kind == "disk" else pattern])
        try:
            path = add_device("one", description, options).path
            assert path is not None
            with reading(path, pattern, threads=4) as readers:
                for _ in range(3):
                    kill_server("one")
                    readers.wait_for_reads(30)
                upgrade_device("one")
                readers.wait_for_reads(30)
            assert (readers.wrong, readers.errors) == (0, [])
        finally:
            remove_all()
