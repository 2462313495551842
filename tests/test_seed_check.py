"""The offline check: healthy seeds are clean, other file systems are told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Need
from hypothesis import given, settings
from hypothesis import strategies as st
from image_edit import Editor
from mkseed_support import CHUNK, EIB, GIB, KIB, MAX_SIZE, MIB, TIB, mkseed

from btrfs_ublk.base.capabilities import BTRFS_PROGS, MKFS_BTRFS
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.seed import make_fallocate_seed
from btrfs_ublk.seed.check import SeedReport, check_seed, check_with_progs
from btrfs_ublk.seed.inspect import inspect_seed

pytestmark = pytest.mark.usefixtures("sanitized_helpers")


@pytest.fixture
def seed(sparse_path: Path) -> Path:
    """20 GiB in five chunks; all trees are one leaf each."""
    path = sparse_path / "seed.img"
    mkseed("--virtual-data-size=20G", "--chunk-size=4G", "--metadata-only", path)
    return path


# Healthy ones


@pytest.mark.parametrize("profile", ["single", "dup"])
@pytest.mark.parametrize("metadata_only", [True, False])
@pytest.mark.parametrize(
    "size", [4 * MIB, 4 * GIB + 4096, 275 * GIB, CHUNK + 4096, 4 * EIB, MAX_SIZE]
)
def test_seeds_are_clean(
    sparse_path: Path, size: int, metadata_only: bool, profile: str
) -> None:
    path = sparse_path / "seed.img"
    options = ["--metadata-only"] if metadata_only else []
    about = mkseed(
        *(f"--virtual-data-size={size}", f"--metadata-profile={profile}"),
        *(*options, path),
    )
    report = check_seed(path)
    assert report.violations == () and report.notes == ()
    assert report.clean and report.seeding and report.strategy == "mega-extent"
    assert report.tree_blocks * 16384 == about["metadata_bytes"]
    assert report.extents == report.references == report.tree_blocks + about["chunks"]


@settings(max_examples=15, deadline=None)
@given(
    blocks=st.integers(MIB // 1024, 16 * TIB // 4096),
    chunk=st.sampled_from([4 * GIB, 12 * GIB, 256 * GIB, TIB]),
    name=st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1
    ).filter(lambda name: name not in (".", "..") and len(name.encode()) <= 255),
)
def test_any_seed_is_clean(
    tmp_path_factory: pytest.TempPathFactory, blocks: int, chunk: int, name: str
) -> None:
    path = tmp_path_factory.mktemp("seed") / "seed.img"
    mkseed(
        *(f"--virtual-data-size={blocks * 4096}", f"--chunk-size={chunk}"),
        *(f"--virtual-data-filename={name}", "--metadata-only", path),
    )
    assert check_seed(path).violations == ()


@pytest.mark.native
@pytest.mark.parametrize("size", [4 * MIB, 40 * GIB])
def test_seeds_of_the_fallocate_strategy_are_clean(
    sparse_path: Path, need: Need, size: int
) -> None:
    need(MKFS_BTRFS)
    path = sparse_path / "seed.img"
    make_fallocate_seed(path, virtual_data_size=size, metadata_only=True)
    report = check_seed(path)
    assert report.violations == ()
    assert report.clean and report.seeding and report.strategy == "fallocate"
    virtual = inspect_seed(path).virtual_data
    assert virtual and virtual.preallocated_extents == 0


# Other file systems, and what is in use


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


@pytest.mark.native
@pytest.mark.parametrize(
    "options",
    [
        ["-m", "dup"],
        ["-m", "single", "-n", "4096"],
        ["--mixed"],
        ["-O", "^skinny-metadata", "-R", "^free-space-tree"],
    ],
)
def test_a_stock_file_system_is_no_seed_and_else_clean(
    sparse_path: Path, need: Need, options: list[str]
) -> None:
    with stock(sparse_path, need, *options) as image:
        report = check_seed(image)
        assert [v.rule for v in report.violations] == ["seeding"]
        assert "not a seed: SEEDING is not set" in report.violations[0].text
        assert report.strategy == "other"
        assert report.references > report.extents > 200
        assert check_with_progs(image).clean


@pytest.mark.native
def test_a_stock_file_system_made_a_seed_has_no_virtual_data(
    sparse_path: Path, need: Need
) -> None:
    with stock(sparse_path, need) as image:
        subprocess.run(["btrfstune", "-S", "1", image], check=True, timeout=60)
        report = check_seed(image)
        assert report.seeding and report.strategy == "other"
        assert [v.rule for v in report.violations] == ["layout"]


@pytest.mark.native
def test_what_is_mounted_is_refused(sparse_path: Path) -> None:
    seed, target = sparse_path / "seed.img", sparse_path / "mount"
    target.mkdir()
    mkseed("--virtual-data-size=4G", seed)
    with loop_device(seed, read_only=True) as loop:
        assert check_seed(seed).clean and check_seed(loop.path).clean
        with mounted(loop.path, target, read_only=True):
            with pytest.raises(BtrfsUblkError, match="is mounted: ") as caught:
                check_seed(seed)
            assert caught.value.hint == "unmount it first"
            with pytest.raises(BtrfsUblkError, match="busy"):
                check_seed(loop.path)
        assert check_seed(seed).clean


@pytest.mark.parametrize("name", ["no-such-file", "."])
def test_what_is_no_image_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BtrfsUblkError):
        check_seed(tmp_path / name)


# btrfs-progs, and the command line


def cli(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", "seed", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_progs_see_metadata_only_images_at_full_size(
    sparse_path: Path, need: Need
) -> None:
    need(BTRFS_PROGS)
    path = sparse_path / "seed.img"
    mkseed("--metadata-only", path)
    assert check_with_progs(path).clean is True
    with Editor(path) as image:
        image.set_super("bytes_used", 1 << 40)
    report = check_with_progs(path)
    assert report.clean is False and report.output


def test_the_command_reports_both(seed: Path, need: Need) -> None:
    need(BTRFS_PROGS)
    done = cli("check", seed)
    assert done.returncode == 0, done.stderr
    assert "clean, strategy mega-extent" in done.stdout
    assert "btrfs check: clean" in done.stdout
    done = cli("check", "--json", seed)
    answer = json.loads(done.stdout)
    assert answer.pop("btrfs_check") == {"clean": True, "reason": None, "output": []}
    report = SeedReport.from_json(json.dumps(answer))
    assert report.clean and report.path == seed

    with Editor(seed) as image:
        image.set_super("flags", 1)
    done = cli("check", "--no-btrfs-check", seed)
    assert done.returncode == 1
    assert done.stdout.startswith("seeding: superblock: not a seed")
    assert "btrfs check: left out" in done.stdout and "1 violation;" in done.stdout


def test_without_progs_it_says_so(seed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    report = check_with_progs(seed)
    assert report.clean is None and "btrfs-progs" in str(report.reason)
