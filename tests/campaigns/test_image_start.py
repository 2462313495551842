"""The campaign that measures starts of images: one turn of each, of a small tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from image_start import PIGZ, SKOPEO, SUBJECTS, UNTAR
from support.needs import Need
from support.paths import TESTS

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Program
from btrfs_ublk.bench.bed import CURL
from btrfs_ublk.bench.file_systems import EROFS, MKFS_EROFS, OVERLAY
from btrfs_ublk.testing.registry import REGISTRY
from btrfs_ublk.units import KIB

BUSYBOX = Program("busybox", package="busybox-static")
LARGE_BYTES = 512 * KIB


@pytest.mark.device
@pytest.mark.timing  # what a lazy image fetches of itself meanwhile depends on time
def test_what_starts_move(need: Need, sparse_path: Path) -> None:
    need(ROOT, BTRFS, LOOP, EROFS, OVERLAY, MKFS_EROFS, BUSYBOX)
    need(REGISTRY, SKOPEO, CURL, PIGZ)
    tree, tar = sparse_path / "tree", sparse_path / "tree.tar"
    (tree / "bin").mkdir(parents=True)
    subprocess.run(["cp", f"/bin/{BUSYBOX.program}", tree / "bin/true"], check=True)
    with (tree / "large").open("wb") as file:
        for _ in range(8):
            file.write(Path("/dev/urandom").open("rb").read(LARGE_BYTES))
    subprocess.run(["tar", "-cf", tar, "-C", tree, "."], check=True)
    campaign = TESTS / "campaigns/image_start.py"
    argv = [sys.executable, campaign, "--tree", tar, "--directory", sparse_path]
    argv += ["--repeats", "1", "--latency", "1", "--mbit", "1000", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    moved = {each["subject"]: each["bytes"] for each in document["results"]}
    asked = {each["subject"]: each["requests"] for each in document["results"]}
    assert moved.keys() == set(SUBJECTS) and asked["local EROFS"] == 0
    assert asked[UNTAR] == 3 and moved[UNTAR] > 8 * LARGE_BYTES
    # Of a start, the large file is no part.
    ours = [each for each in moved if "image" in each]
    assert all(moved[each] < moved[UNTAR] / 2 for each in ours), moved
    (table,) = document["tables"]
    assert [row[0] for row in table["rows"]] == list(SUBJECTS)
