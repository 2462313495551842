"""Clones: shared data, exact sizes, and what each refusal means."""

from __future__ import annotations

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


def extents(path: Path) -> str:
    os.sync()
    return run(["filefrag", "-v", path], timeout_s=10).stdout


def test_a_range_is_shared(source: Path) -> None:
    target = source.with_name("target")
    target.write_bytes(bytes(4 * BLOCK))
    clone_range(
        source, target, source_offset=BLOCK, length_bytes=BLOCK, target_offset=2 * BLOCK
    )
    block = source.read_bytes()[BLOCK : 2 * BLOCK]
    assert target.read_bytes() == bytes(2 * BLOCK) + block + bytes(BLOCK)
    assert "shared" in extents(target)


def test_zero_length_means_to_the_end(source: Path) -> None:
    target = source.with_name("target")
    target.touch()
    with source.open("rb") as first, target.open("r+b") as second:
        clone_range(first.fileno(), second.fileno(), source_offset=BLOCK)
    assert target.read_bytes() == source.read_bytes()[BLOCK:]


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 2 * BLOCK + 100])
def test_a_new_file_has_the_exact_size(source: Path, size: int) -> None:
    target = source.with_name("target")
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


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_they_do_not_mind_a_directory_s_compression(
    bare_source: Path, compression: str
) -> None:
    directory = bare_source.parent
    run(
        ["btrfs", "property", "set", directory, "compression", compression],
        timeout_s=10,
    )
    target = directory / "target"
    clone_file(bare_source, target, source_offset=0, size_bytes=2 * BLOCK)
    assert target.read_bytes() == bare_source.read_bytes()
    assert get_attributes(target) & NO_COW


def test_an_existing_file_is_not_replaced(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(UsageError, match="File exists"):
        clone_file(source, source, source_offset=0, size_bytes=BLOCK)
    assert source.read_bytes() == before


def test_a_source_that_is_not_there(source: Path) -> None:
    target = source.with_name("target")
    for size in (0, BLOCK):
        with pytest.raises(UsageError, match="clone source .*No such file"):
            clone_file(
                source.with_name("none"), target, source_offset=0, size_bytes=size
            )
    assert not target.exists()


def test_a_failed_clone_leaves_no_file(source: Path) -> None:
    target = source.with_name("target")
    with pytest.raises(BtrfsUblkError, match="not multiples"):
        clone_file(source, target, source_offset=1, size_bytes=BLOCK)
    assert not target.exists()


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (3 * BLOCK, 101),
        (2 * BLOCK, 8 * BLOCK),
        (BLOCK, 1 << 63),
        (BLOCK, -1),
        (4 * BLOCK, 0),
        (70 << 40, BLOCK),
        (1 << 70, BLOCK),
        (-BLOCK, BLOCK),
    ],
)
def test_a_range_that_is_not_in_the_source(
    source: Path, offset: int, size: int
) -> None:
    """What is missing would be a hole, which reads as zeroes."""
    target = source.with_name("target")
    message = f"cannot clone {size} bytes at offset {offset} of .*it has 12388 bytes"
    with pytest.raises(UsageError, match=message):
        clone_file(source, target, source_offset=offset, size_bytes=size)
    assert not target.exists()


@pytest.mark.parametrize("what", ["source_offset", "length_bytes", "target_offset"])
@pytest.mark.parametrize("value", [-1, 1 << 63, 1 << 64])
def test_ranges_that_no_file_has(source: Path, what: str, value: int) -> None:
    target = source.with_name("target")
    target.touch()
    with pytest.raises(UsageError, match=f"{what} {value} is not from 0 to"):
        clone_range(source, target, **{what: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source_offset": 1, "length_bytes": BLOCK}, "not multiples of 4096"),
        ({"target_offset": 5}, "not multiples of 4096"),
        ({"length_bytes": 100}, "not multiples of 4096"),
        ({"length_bytes": 8 * BLOCK}, "the source ends at 12388 bytes"),
    ],
)
def test_wrong_ranges_are_explained(
    source: Path, arguments: dict[str, int], message: str
) -> None:
    target = source.with_name("target")
    target.touch()
    with pytest.raises(BtrfsUblkError, match=message):
        clone_range(source, target, **arguments)


def test_a_difference_in_checksums_is_explained(source: Path) -> None:
    target = source.with_name("target")
    target.touch()
    run(["chattr", "+C", target], timeout_s=10)
    with pytest.raises(BtrfsUblkError, match="nodatasum") as caught:
        clone_range(source, target)
    assert "chattr" in str(caught.value)


def test_another_file_system_is_explained(source: Path, sparse_path: Path) -> None:
    (sparse_path / "target").touch()
    with pytest.raises(BtrfsUblkError, match="different file systems"):
        clone_range(source, sparse_path / "target")


def test_an_immutable_target_is_explained(source: Path) -> None:
    target = source.with_name("target")
    target.touch()
    run(["chattr", "+i", target], timeout_s=10)
    with pytest.raises(BtrfsUblkError, match="immutable"):
        clone_range(source, target)


def test_a_missing_source_is_named(source: Path) -> None:
    with pytest.raises(UsageError, match="no-such-file: No such file"):
        clone_range(source.with_name("no-such-file"), source)
