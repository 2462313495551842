"""What can be chosen of a seed beside its size and names: profile and inheritance."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from support.seeds import GIB, KIB, btrfs_check, mkseed, sprout

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.kernel import clone_range
from btrfs_ublk.kernel.attributes import NO_COW, get_attributes
from btrfs_ublk.kernel.btrfs import reached_inode

SIZE = f"--virtual-data-size={64 * GIB}"


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


def test_a_sprout_inherits_the_profile(
    sparse_path: Path, need: Callable[..., None]
) -> None:
    need(BTRFS_PROGS)
    seed = sparse_path / "seed.img"
    about = mkseed("--virtual-data-size=4E", "--metadata-profile=dup", seed)
    assert 2 * about["metadata_bytes"] <= about["allocated_bytes"]
    btrfs_check(seed)
    with sprout(seed, sparse_path) as (mount, _):
        (mount.target / "new").write_bytes(b"new")
        os.sync()
        found = profiles(mount.target)
        assert (found["System"], found["Metadata"]) == ("DUP", "DUP")


def test_without_inheritance_files_have_checksums(sparse_path: Path) -> None:
    seed = sparse_path / "seed.img"
    mkseed(SIZE, seed)
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
