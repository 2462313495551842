"""The on-disk format library: its pieces, and a writable file system made with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from support.sanitized_build import SANITIZER_ENVIRONMENT, sanitized_build
from support.seeds import KIB, btrfs_check

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.kernel import loop_device, mounted

#: The fixture, under a name of this module's.
sanitizers = sanitized_build


EXTENT_BYTES = 64 * KIB


def run(build: Path, program: str, *args: str | Path) -> None:
    done = subprocess.run(
        [build / "csrc/tests" / program, *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr


def test_the_kernel_reads_and_writes_such_an_image(
    sanitizers: Path, sparse_path: Path, need: Callable[..., None]
) -> None:
    need(BTRFS_PROGS)
    image, target = sparse_path / "image", sparse_path / "mount"
    target.mkdir()
    run(sanitizers, "format-image", "2000", image)
    with loop_device(image) as loop, mounted(loop.path, target):
        names = {f"file-{number}" for number in range(2000)}
        assert set(os.listdir(target)) == names
        assert (target / "file-0").stat().st_size == 2 * EXTENT_BYTES
        (target / "file-1").write_bytes(b"\1" * EXTENT_BYTES)
        (target / "new").write_bytes(b"new")
        (target / "file-7").unlink()
        os.sync()
        # What shares the extent of the file that was written over has not changed.
        for number in (0, 2, 3, 1999):
            assert not (target / f"file-{number}").read_bytes().strip(b"\0")
        subprocess.run(
            ["btrfs", "balance", "start", "-m", target],
            check=True,
            capture_output=True,
            timeout=60,
        )
    btrfs_check(image)
