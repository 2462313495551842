"""What btrfs-ublk-mkseed writes, as btrfs-progs, the kernel and our reader see it."""

import os
import stat
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.processes import looking_at_all_devices
from support.seeds import (
    BLOCK,
    CHUNK,
    EIB,
    GIB,
    IDENTITY,
    KIB,
    MAX_SIZE,
    MIB,
    btrfs_check,
    digest,
    mkseed,
    sprout,
)

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.kernel import clone_file, clone_range, loop_device
from btrfs_ublk.kernel.attributes import IMMUTABLE, NO_COW, get_attributes
from btrfs_ublk.kernel.btrfs import reached_inode


@pytest.fixture(scope="module", autouse=True)
def btrfs_progs(need: Callable[..., None]) -> None:
    need(BTRFS_PROGS)


@pytest.mark.parametrize(
    "size",
    [
        4 * MIB,
        CHUNK + BLOCK,
        4 * EIB,
        pytest.param(MAX_SIZE, marks=pytest.mark.thorough),
    ],
)
def test_a_sprout_of_the_seed_clones_and_reads(sparse_path: Path, size: int) -> None:
    seed = sparse_path / "seed.img"
    mkseed(*IDENTITY, f"--virtual-data-size={size}", "--label=seed", seed)
    before = digest(seed)
    with sprout(seed, sparse_path) as (mount, _), ExitStack() as kernel:
        virtual = kernel.enter_context(reached_inode(mount.target, 257))
        status = virtual.stat()
        assert (status.st_size, status.st_ino) == (size, 257)
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o400)
        assert status.st_mtime == 1700000000
        assert os.listdir(mount.target) == []
        assert get_attributes(virtual) & (IMMUTABLE | NO_COW) == IMMUTABLE | NO_COW
        assert not get_attributes(mount.target) & NO_COW

        length = 64 * KIB
        boundaries = range(CHUNK - length // 2, size - length, CHUNK * 1000)
        offsets = [0, size // 2 // BLOCK * BLOCK, size - length, *boundaries]
        for number, offset in enumerate(offsets):
            clone = mount.target / f"clone-{number}"
            clone_file(virtual, clone, source_offset=offset, size_bytes=length)
            assert clone.read_bytes() == bytes(length), offset
        (mount.target / "own").write_bytes(b"own data" * 1000)
        with (mount.target / "clone-0").open("r+b") as file:
            file.write(b"overwritten")
        os.sync()
        assert (mount.target / "clone-0").read_bytes()[:12] == b"overwritten\0"
    assert digest(seed) == before
    with (
        loop_device(seed, read_only=True),
        loop_device(sparse_path / "local.img", read_only=True) as local,
    ):
        with looking_at_all_devices():
            btrfs_check(local.path)  # finds the seed by itself


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
