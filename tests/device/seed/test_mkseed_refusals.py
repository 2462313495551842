"""btrfs-ublk-mkseed's manners: bad input, outputs that exist, failures, kills."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from support.seeds import MIB, assert_refused, mkseed, mkseed_raw

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.kernel import loop_device, mounted


def test_a_file_system_that_is_too_small(
    sparse_path: Path, need: Callable[..., None]
) -> None:
    need(Program("mkfs.ext4", "e2fsprogs"))
    disk, target = sparse_path / "disk.img", sparse_path / "mount"
    target.mkdir()
    with disk.open("wb") as file:
        file.truncate(12 * MIB)
    subprocess.run(
        ["mkfs.ext4", "-b", "4096", disk], check=True, capture_output=True, timeout=30
    )
    with loop_device(disk) as loop, mounted(loop.path, target, fs_type="ext4"):
        before = os.listdir(target)
        done = mkseed_raw(target / "seed.img")
        assert_refused(
            *(done, 1, "cannot hold a sparse file of 4 EiB"),
            *("xfs, btrfs and tmpfs", "--metadata-only"),
        )
        assert os.listdir(target) == before

        mkseed("--metadata-only", target / "seed.img")
        (target / "seed.img").unlink()
        (target / "filler").write_bytes(bytes(4 * MIB))
        done = mkseed_raw("--metadata-only", target / "seed.img")
        assert_refused(done, 1, "No space left", "7159808 bytes")
        assert sorted(os.listdir(target)) == sorted([*before, "filler"])
