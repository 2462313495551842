"""What btrfs-ublk-mkseed writes, as btrfs-progs, the kernel and our reader see it."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.seeds import (
    BLOCK,
    CHUNK,
    EIB,
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
from btrfs_ublk.kernel import clone_file, loop_device
from btrfs_ublk.kernel.btrfs import reached_inode


@pytest.fixture(scope="module", autouse=True)
def btrfs_progs(need: Callable[..., None]) -> None:
    need(BTRFS_PROGS)


def flags_of(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        answer = fcntl.ioctl(fd, 0x80086601, bytes(8))  # FS_IOC_GETFLAGS
    finally:
        os.close(fd)
    flags: int = struct.unpack("=Q", answer)[0] & 0xFFFFFFFF
    return flags


IMMUTABLE, NOCOW = 0x10, 0x800000


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
        assert flags_of(virtual) & (IMMUTABLE | NOCOW) == IMMUTABLE | NOCOW
        assert not flags_of(mount.target) & NOCOW

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
        btrfs_check(local.path)  # finds the seed by itself
