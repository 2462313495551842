"""The offline check: healthy seeds are clean, other file systems are told apart."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.needs import Need
from support.seeds import GIB, KIB, MIB, mkseed

from btrfs_ublk.base.capabilities import BTRFS_PROGS, MKFS_BTRFS
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.seed import make_fallocate_seed
from btrfs_ublk.seed.check import check_seed, check_with_progs
from btrfs_ublk.seed.inspect import inspect_seed


@pytest.fixture
def seed(sparse_path: Path) -> Path:
    """20 GiB in five chunks; all trees are one leaf each."""
    path = sparse_path / "seed.img"
    mkseed("--virtual-data-size=20G", "--chunk-size=4G", "--metadata-only", path)
    return path


def test_seeds_of_the_fallocate_strategy_are_clean(
    sparse_path: Path, need: Need
) -> None:
    need(MKFS_BTRFS)
    path = sparse_path / "seed.img"
    make_fallocate_seed(path, virtual_data_size=40 * GIB, metadata_only=True)
    report = check_seed(path)
    assert report["violations"] == []
    assert report["clean"] and report["seeding"] and report["strategy"] == "fallocate"
    assert inspect_seed(path)["virtual_data"]["preallocated_extents"] == 0


def populate(target: Path) -> None:
    for number in range(200):
        (target / f"file-{number}").write_bytes(os.urandom(number * 97))
    (target / "big").write_bytes(os.urandom(3 * MIB))
    os.sync()
    for snapshot in ("one", "two"):
        btrfs("subvolume", "snapshot", target, target / snapshot)
    with (target / "big").open("r+b") as file:
        for offset in range(0, 3 * MIB, 256 * KIB):
            file.seek(offset)
            file.write(b"changed" * 1000)
    for number in range(0, 200, 3):
        (target / "one" / f"file-{number}").unlink()
    btrfs("subvolume", "snapshot", target / "one", target / "three")
    with (target / "prealloc").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 10 * MIB)
    os.sync()


def btrfs(*words: str | Path) -> None:
    subprocess.run(["btrfs", *words], check=True, capture_output=True, timeout=60)


@contextmanager
def stock(path: Path, need: Need, *options: str) -> Iterator[Path]:
    need(MKFS_BTRFS, BTRFS_PROGS)
    target = path / "mount"
    target.mkdir()
    image = path / "stock.img"
    image.touch()
    os.truncate(image, GIB)
    subprocess.run(
        ["mkfs.btrfs", "-q", *options, image],
        check=True,
        capture_output=True,
        timeout=60,
    )
    with loop_device(image) as loop, mounted(loop.path, target):
        populate(target)
    yield image


@pytest.mark.parametrize(
    "options", [["-m", "dup"], ["-O", "^skinny-metadata", "-R", "^free-space-tree"]]
)
def test_a_stock_file_system_is_no_seed_and_else_clean(
    sparse_path: Path, need: Need, options: list[str]
) -> None:
    with stock(sparse_path, need, *options) as image:
        report = check_seed(image)
        assert [v["rule"] for v in report["violations"]] == ["seeding"]
        assert "not a seed: SEEDING is not set" in report["violations"][0]["text"]
        assert report["strategy"] == "other"
        assert check_with_progs(image).clean


def test_a_stock_file_system_made_a_seed_has_no_virtual_data(
    sparse_path: Path, need: Need
) -> None:
    with stock(sparse_path, need) as image:
        subprocess.run(["btrfstune", "-S", "1", image], check=True, timeout=60)
        report = check_seed(image)
        assert report["seeding"] and report["strategy"] == "other"
        assert [v["rule"] for v in report["violations"]] == ["layout"]


def test_what_is_mounted_is_refused(sparse_path: Path) -> None:
    seed, target = sparse_path / "seed.img", sparse_path / "mount"
    target.mkdir()
    mkseed("--virtual-data-size=4G", seed)
    with loop_device(seed, read_only=True) as loop:
        assert check_seed(seed)["clean"] and check_seed(loop.path)["clean"]
        with mounted(loop.path, target, read_only=True):
            with pytest.raises(BtrfsUblkError, match="is mounted: ") as caught:
                check_seed(seed)
            assert caught.value.hint == "unmount it first"
            with pytest.raises(BtrfsUblkError, match="busy"):
                check_seed(loop.path)
        assert check_seed(seed)["clean"]
