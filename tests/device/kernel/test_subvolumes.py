"""Subvolumes and snapshots of a btrfs, and what they are charged for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import new_btrfs

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.btrfs import (
    charged_bytes,
    commit_transaction,
    create_snapshot,
    create_subvolume,
    delete_subvolume,
    enable_simple_quota,
    set_read_only,
    subvolume_id,
)

MIB = 1 << 20


@pytest.fixture
def btrfs(test_root: Path) -> Iterator[Path]:
    with new_btrfs(test_root, size_bytes=256 * MIB) as mount:
        yield mount


def test_a_snapshot_is_independent(btrfs: Path) -> None:
    first = create_subvolume(btrfs, "first")
    (first / "file").write_text("old")
    second = create_snapshot(first, btrfs, "second")
    (second / "file").write_text("new")
    assert (first / "file").read_text() == "old"
    assert subvolume_id(first) != subvolume_id(second) == subvolume_id(second / "file")
    delete_subvolume(first)
    assert os.listdir(btrfs) == ["second"]


def test_the_kernel_log_is_named_only_where_it_says_something(btrfs: Path) -> None:
    with pytest.raises(BtrfsUblkError, match="No such file or directory") as caught:
        delete_subvolume(btrfs / "missing")
    assert caught.value.hint is None


def test_a_subvolume_can_be_read_only_for_a_while(btrfs: Path) -> None:
    first = create_subvolume(btrfs, "first")
    second = create_snapshot(first, btrfs, "second", read_only=True)
    for subvolume in (first, second):
        set_read_only(subvolume)
        with pytest.raises(OSError) as caught:
            (subvolume / "file").touch()
        assert caught.value.errno == errno.EROFS
        set_read_only(subvolume, False)
        (subvolume / "file").touch()


def test_who_writes_is_charged(btrfs: Path) -> None:
    enable_simple_quota(btrfs)
    enable_simple_quota(btrfs)
    first = create_subvolume(btrfs, "first")
    (first / "file").write_bytes(os.urandom(3 * MIB))
    second = create_snapshot(first, btrfs, "second")
    (second / "more").write_bytes(os.urandom(MIB))
    commit_transaction(btrfs)
    assert 3 <= charged_bytes(btrfs, subvolume_id(first)) / MIB < 4
    assert 1 <= charged_bytes(btrfs, subvolume_id(second)) / MIB < 2


def test_what_is_no_subvolume(btrfs: Path) -> None:
    (btrfs / "directory").mkdir()
    with pytest.raises(BtrfsUblkError, match="cannot make .*/copy, a snapshot of"):
        create_snapshot(btrfs / "directory", btrfs, "copy")
    with pytest.raises(BtrfsUblkError, match="cannot delete .*/directory"):
        delete_subvolume(btrfs / "directory")
    with pytest.raises(BtrfsUblkError, match="cannot make .*/copy, a snapshot of"):
        create_snapshot(btrfs / "absent", btrfs, "copy")
    with pytest.raises(BtrfsUblkError, match="has no quota"):
        charged_bytes(btrfs, 5)
    assert (btrfs / "directory").is_dir()
