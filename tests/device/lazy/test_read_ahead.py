"""Read-ahead of a sprout: it is set last, it holds, and page faults fetch no more."""

import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS, BTRFS_PROGS, LOOP
from btrfs_ublk.kernel.read_ahead import get_read_ahead, set_read_ahead
from btrfs_ublk.server import FrontEndName, MemsetSegment
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume.sprout import DEFAULT_READ_AHEAD_BYTES
from btrfs_ublk.volume.temporary import Volume, volume

SIZE = 64 * MIB


@pytest.fixture
def target(sparse_path: Path, need: Need) -> Path:
    need(BTRFS, LOOP)
    path = sparse_path / "mnt"
    path.mkdir()
    return path


@contextmanager
def made_volume(
    target: Path, front_end: FrontEndName, read_ahead_bytes: int | None
) -> Iterator[Volume]:
    with volume(
        target,
        [MemsetSegment(offset=0, length=SIZE, byte=97)],
        virtual_data_size=SIZE,
        parent=target.parent,
        front_end=front_end,
        read_ahead_bytes=read_ahead_bytes,
    ) as made:
        yield made


def fetched_by_a_fault(made: Volume, path: Path) -> int:
    """Bytes that the server delivers for one page in the middle of a mapped file."""

    def delivered() -> int:
        stats = made.server.stats()
        return stats.kinds["memset"].read_bytes

    before = delivered()
    fd = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            assert memory[SIZE // 2] == 97
    finally:
        os.close(fd)
    return delivered() - before


@pytest.mark.parametrize("size", [0, DEFAULT_READ_AHEAD_BYTES])
def test_a_page_fault_fetches_that_much(
    front_end: FrontEndName, target: Path, size: int
) -> None:
    with made_volume(target, front_end, size) as made:
        clone = made.clone("clone", offset=0, size_bytes=SIZE)
        assert get_read_ahead(target) == size
        # The block device's own, which plays no part.
        block = Path("/sys/block", made.server.device.name)
        (block / "queue/read_ahead_kb").write_text("8")
        assert fetched_by_a_fault(made, clone) == max(size, mmap.PAGESIZE)


def test_it_holds_whatever_is_done_with_the_sprout(
    front_end: FrontEndName, target: Path, need: Need
) -> None:
    need(BTRFS_PROGS)
    with made_volume(target, front_end, 256 * KIB) as made:
        clone = made.clone("clone", offset=0, size_bytes=SIZE)
        (target / "file").write_bytes(bytes(MIB))
        for argv in (
            ["btrfs", "subvolume", "snapshot", target, target / "snapshot"],
            ["mount", "-o", "remount,ro", target],
            ["mount", "-o", "remount,rw", target],
            ["btrfs", "filesystem", "resize", "2:max", target],
            ["sync", "--file-system", target],
        ):
            subprocess.run(argv, check=True, capture_output=True, timeout=60)
            assert get_read_ahead(target) == 256 * KIB, argv
        assert fetched_by_a_fault(made, clone) == 256 * KIB
        # Of the seed's own, which the sprout took over, nothing is left.
        assert not Path("/sys/fs/btrfs", str(made.seed.fsid)).exists()
        set_read_ahead(target, 64 * KIB)
        assert get_read_ahead(target) == 64 * KIB
