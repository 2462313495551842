"""The layout that is printed of seeds and of other file systems."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.seeds import GIB, MIB, mkfs

from btrfs_ublk.base.capabilities import MKFS_BTRFS
from btrfs_ublk.base.helpers import HELPERS_VARIABLE
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.seed.inspect import inspect_seed


@pytest.fixture(autouse=True)
def sanitized_helpers(
    sanitized_build: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv(HELPERS_VARIABLE, str(sanitized_build / "csrc/tools"))
    for name, value in SANITIZER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield


def test_a_stock_file_system_is_no_seed(sparse_path: Path, need: Need) -> None:
    need(MKFS_BTRFS)
    (image,) = mkfs(sparse_path, "-L", "stock", "-m", "dup")
    target = sparse_path / "mount"
    target.mkdir()
    with loop_device(image) as loop, mounted(loop.path, target):
        (target / "file").write_bytes(os.urandom(MIB))
        subprocess.run(
            ["btrfs", "subvolume", "create", target / "subvolume"],
            check=True,
            capture_output=True,
            timeout=60,
        )
    layout = inspect_seed(image)
    assert layout.label == "stock" and not layout.seeding
    assert layout.strategy == "other" and layout.virtual_data is None
    assert layout.subvolumes == 2 and not layout.new_files_nodatasum
    assert layout.default_subvolume == 5
    assert (layout.data_extents, layout.data_extent_bytes) == (1, MIB)
    assert {(c.type, c.profile) for c in layout.chunks} == {
        ("SYSTEM", "DUP"),
        ("METADATA", "DUP"),
        ("DATA", "SINGLE"),
    }
    assert layout.file_bytes == layout.device_bytes == GIB


def test_a_preallocated_file_is_seen(sparse_path: Path, need: Need) -> None:
    """What the fallocate strategy starts from, before and after SEEDING is set."""
    need(MKFS_BTRFS)
    (image,) = mkfs(sparse_path)
    target = sparse_path / "mount"
    target.mkdir()
    with loop_device(image) as loop, mounted(loop.path, target):
        (target / "virtual").touch()
        subprocess.run(["chattr", "+C", target / "virtual"], check=True, timeout=60)
        with (target / "virtual").open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, 64 * MIB)
    assert inspect_seed(image).virtual_data is None
    subprocess.run(["btrfstune", "-S", "1", image], check=True, timeout=60)
    layout = inspect_seed(image)
    assert layout.strategy == "fallocate" and layout.virtual_data
    virtual = layout.virtual_data
    assert (virtual.filename, virtual.size) == ("virtual", 64 * MIB)
    assert virtual.extents == virtual.preallocated_extents > 0
    assert virtual.flags == ("NODATASUM", "NODATACOW", "PREALLOC")
