"""Clones: shared data, exact sizes, and what each refusal means."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import new_btrfs

from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel import clone_file, clone_range
from btrfs_ublk.kernel.attributes import NO_COW, get_attributes

pytestmark = pytest.mark.data

BLOCK = 4096


@pytest.fixture(scope="module")
def btrfs(test_root: Path) -> Iterator[Path]:
    with new_btrfs(test_root, size_bytes=256 << 20) as mount:
        yield mount


@pytest.fixture
def source(btrfs: Path) -> Iterator[Path]:
    path = btrfs / "source"
    path.write_bytes(os.urandom(3 * BLOCK + 100))
    yield path
    for leftover in btrfs.iterdir():
        subprocess.run(["chattr", "-i", leftover], check=False, stderr=-3, timeout=10)
        leftover.unlink()


def test_a_range_is_shared(source: Path) -> None:
    target = source.with_name("target")
    target.write_bytes(bytes(4 * BLOCK))
    clone_range(
        source, target, source_offset=BLOCK, length_bytes=BLOCK, target_offset=2 * BLOCK
    )
    block = source.read_bytes()[BLOCK : 2 * BLOCK]
    assert target.read_bytes() == bytes(2 * BLOCK) + block + bytes(BLOCK)
    os.sync()
    assert "shared" in run(["filefrag", "-v", target], timeout_s=10).stdout


def test_a_new_file_has_the_exact_size(source: Path) -> None:
    for size in (0, 1, BLOCK, BLOCK + 1, 2 * BLOCK + 100):
        target = source.with_name(f"target-{size}")
        clone_file(source, target, source_offset=BLOCK, size_bytes=size)
        assert target.read_bytes() == source.read_bytes()[BLOCK : BLOCK + size]


@pytest.fixture
def bare_source(btrfs: Path) -> Iterator[Path]:
    """A file without checksums, and a directory for others beside it."""
    directory = btrfs / "directory"
    directory.mkdir()
    path = directory / "bare"
    path.touch()
    run(["chattr", "+C", path], timeout_s=10)
    path.write_bytes(os.urandom(2 * BLOCK))
    yield path
    shutil.rmtree(directory)


def test_clones_of_a_file_without_checksums_have_none(bare_source: Path) -> None:
    target = bare_source.with_name("target")
    clone_file(bare_source, target, source_offset=0, size_bytes=BLOCK + 1)
    assert target.read_bytes() == bare_source.read_bytes()[: BLOCK + 1]
    assert get_attributes(target) & NO_COW


def test_they_do_not_mind_a_directory_s_compression(bare_source: Path) -> None:
    directory = bare_source.parent
    for compression in ("zstd", "none"):
        words = ["btrfs", "property", "set", directory, "compression", compression]
        run(words, timeout_s=10)
        target = directory / f"target-{compression}"
        clone_file(bare_source, target, source_offset=0, size_bytes=2 * BLOCK)
        assert target.read_bytes() == bare_source.read_bytes()
        assert get_attributes(target) & NO_COW


def test_an_existing_file_is_not_replaced(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(UsageError, match="File exists"):
        clone_file(source, source, source_offset=0, size_bytes=BLOCK)
    assert source.read_bytes() == before


def test_a_failed_clone_leaves_no_file(source: Path) -> None:
    target = source.with_name("target")
    with pytest.raises(BtrfsUblkError, match="not multiples"):
        clone_file(source, target, source_offset=1, size_bytes=BLOCK)
    assert not target.exists()


def test_a_range_that_is_not_in_the_source(source: Path) -> None:
    """What is missing would be a hole, which reads as zeroes."""
    target = source.with_name("target")
    for offset, size in (
        (3 * BLOCK, 101),
        (BLOCK, 1 << 63),
        (BLOCK, -1),
        (1 << 70, BLOCK),
        (-BLOCK, BLOCK),
    ):
        message = f"cannot clone {size} bytes at offset {offset} of .*it has 12388 byt"
        with pytest.raises(UsageError, match=message):
            clone_file(source, target, source_offset=offset, size_bytes=size)
        assert not target.exists()
