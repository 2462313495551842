"""The reader of the on-disk format library, on healthy and on damaged images."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sanitized_build import SANITIZER_ENVIRONMENT, sanitized_build
from support.seeds import MIB

from btrfs_ublk.base.capabilities import MKFS_BTRFS

#: The fixture, under a name of this module's.
sanitizers = sanitized_build


def read_image(build: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [build / "csrc/tests/read-image", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("options", [["-m", "dup"], ["-m", "single"], ["-n", "4096"]])
def test_a_stock_file_system_is_read_and_written_back_unchanged(
    sanitizers: Path, sparse_path: Path, need: Callable[..., None], options: list[str]
) -> None:
    need(MKFS_BTRFS)
    image = sparse_path / "image"
    image.touch()
    os.truncate(image, 256 * MIB)
    subprocess.run(
        ["mkfs.btrfs", "-q", *options, image],
        check=True,
        capture_output=True,
        timeout=60,
    )
    before = digest(image)
    done = read_image(sanitizers, "--rewrite", image)
    assert done.returncode == 0, done.stderr
    assert digest(image) == before
    trees = {line.split()[0] for line in done.stdout.splitlines()[3:]}
    assert trees >= {"1", "2", "3", "4", "5", "7"}


def test_high_trees_are_read(sanitizers: Path, sparse_path: Path) -> None:
    image = sparse_path / "image"
    subprocess.run(
        [sanitizers / "csrc/tests/format-image", "30000", image],
        check=True,
        timeout=60,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    done = read_image(sanitizers, image)
    assert done.returncode == 0, done.stderr
    assert "\n5 150003 " in done.stdout  # five items per file, three of the directory
