"""`seed check`: healthy seeds are clean, other file systems are told apart."""

import json
import os
from pathlib import Path

import pytest
from support.devices import any_command
from support.images import FREE_SPACE_TREE, Editor
from support.needs import Need
from support.seeds import GIB, mkseed

from btrfs_ublk.base.capabilities import BTRFS_PROGS, MKFS_BTRFS
from btrfs_ublk.base.process import run
from btrfs_ublk.seed import inspect_seed, make_fallocate_seed

pytestmark = pytest.mark.usefixtures("in_process")


def test_seeds_are_clean(sparse_path: Path, need: Need) -> None:
    need(MKFS_BTRFS, BTRFS_PROGS)
    paths = {name: sparse_path / name for name in ("mega-extent", "fallocate")}
    mkseed("--virtual-data-size=20G", "--metadata-only", paths["mega-extent"])
    make_fallocate_seed(
        paths["fallocate"], virtual_data_size=40 * GIB, metadata_only=True
    )
    for strategy, path in paths.items():
        done = any_command("seed", "check", "--json", path)
        report = json.loads(done.stdout)
        assert done.returncode == 0 and report["clean"] and report["seeding"]
        assert report["strategy"] == strategy
        found = inspect_seed(path)["virtual_data"]
        assert found["preallocated_extents"] == 0


def test_what_is_no_seed_or_damaged_is_told(sparse_path: Path, need: Need) -> None:
    need(MKFS_BTRFS, BTRFS_PROGS)
    stock, damaged = sparse_path / "stock.img", sparse_path / "damaged.img"
    stock.touch()
    os.truncate(stock, GIB)
    run(["mkfs.btrfs", "-q", stock], timeout_s=60)
    done = any_command("seed", "check", stock)
    assert done.returncode == 1 and "SEEDING is not set" in done.stdout
    mkseed("--virtual-data-size=1G", damaged)
    with Editor(damaged) as editor:  # what only `btrfs check` reads
        editor.write(editor.roots[FREE_SPACE_TREE], bytes(editor.node_bytes))
    done = any_command("seed", "check", "--json", damaged)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["seeding"] and not report["clean"]
    assert report["btrfs_check"]["clean"] is False
