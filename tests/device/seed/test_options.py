"""What can be chosen of a seed beside its size and names: profile and inheritance."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.seeds import GIB, KIB, MIB, btrfs_check, mkseed, mkseed_raw, sprout

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.kernel import clone_range
from btrfs_ublk.kernel.attributes import NO_COW, get_attributes
from btrfs_ublk.kernel.btrfs import reached_inode

SIZE = f"--virtual-data-size={64 * GIB}"


@pytest.mark.parametrize("size", [4 * MIB, 4 << 60])
def test_duplicated_metadata_are_clean(
    sparse_path: Path, need: Callable[..., None], size: int
) -> None:
    need(BTRFS_PROGS)
    seed = sparse_path / "seed.img"
    about = mkseed(f"--virtual-data-size={size}", "--metadata-profile=dup", seed)
    assert about["metadata_profile"] == "dup"
    assert 2 * about["metadata_bytes"] <= about["allocated_bytes"]
    btrfs_check(seed)


@pytest.mark.parametrize(
    "option", ["--metadata-profile=raid1", "--inherit-nodatasum=yes"]
)
def test_other_words_are_refused(tmp_path: Path, option: str) -> None:
    done = mkseed_raw(option, tmp_path / "seed.img")
    assert done.returncode == 2
    assert b"is neither" in done.stderr and b"hint: " in done.stderr
    assert not os.listdir(tmp_path)


def profiles(target: Path) -> dict[str, str]:
    done = subprocess.run(
        ["btrfs", "filesystem", "df", target],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    words = (line.split(":")[0].split(", ") for line in done.stdout.splitlines())
    return {kind: profile for kind, profile in words}


@pytest.mark.parametrize("profile", ["single", "dup"])
def test_a_sprout_inherits_the_profile(
    sparse_path: Path, need: Callable[..., None], profile: str
) -> None:
    need(BTRFS_PROGS)
    seed = sparse_path / "seed.img"
    mkseed(SIZE, f"--metadata-profile={profile}", seed)
    with sprout(seed, sparse_path) as (mount, _):
        (mount.target / "new").write_bytes(b"new")
        os.sync()
        found = profiles(mount.target)
        expected = {"single": "single", "dup": "DUP"}[profile]
        assert (found["System"], found["Metadata"]) == (expected, expected)


@pytest.mark.parametrize("option", ["--inherit-nodatasum=off", ""])
def test_without_inheritance_files_have_checksums(
    sparse_path: Path, option: str
) -> None:
    seed = sparse_path / "seed.img"
    mkseed(SIZE, *filter(None, [option]), seed)
    with sprout(seed, sparse_path) as (mount, _):
        clone = mount.target / "clone"
        clone.touch()
        assert not get_attributes(clone) & NO_COW
        with reached_inode(mount.target, 257) as virtual:
            subprocess.run(["chattr", "+C", clone], check=True, timeout=30)
            clone_range(virtual, clone, source_offset=0, length_bytes=64 * KIB)
        assert clone.read_bytes() == bytes(64 * KIB)


def test_with_inheritance_all_files_take_clones(sparse_path: Path) -> None:
    seed = sparse_path / "seed.img"
    mkseed(SIZE, "--inherit-nodatasum=on", seed)
    with sprout(seed, sparse_path) as (mount, _):
        clone = mount.target / "clone"
        clone.touch()
        with reached_inode(mount.target, 257) as virtual:
            clone_range(virtual, clone, source_offset=0, length_bytes=64 * KIB)
        assert clone.read_bytes() == bytes(64 * KIB)
