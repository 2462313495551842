"""The on-disk format library: its pieces, and a writable file system made with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sanitized_build import SANITIZER_ENVIRONMENT, sanitized_build
from support.seeds import btrfs_check

from btrfs_ublk.base.capabilities import BTRFS_PROGS

#: The fixture, under a name of this module's.
sanitizers = sanitized_build


def run(build: Path, program: str, *args: str | Path) -> None:
    done = subprocess.run(
        [build / "csrc/tests" / program, *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr


#: Trees of one level and of more; metadata in one chunk and in several.
@pytest.mark.parametrize("files", [1, 110, 30000])
def test_an_image_of_many_files_is_clean(
    sanitizers: Path, sparse_path: Path, need: Callable[..., None], files: int
) -> None:
    need(BTRFS_PROGS)
    run(sanitizers, "format-image", str(files), sparse_path / "image")
    btrfs_check(sparse_path / "image")
