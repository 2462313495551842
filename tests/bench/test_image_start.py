"""The study of starts of images: one turn of each, of a small tree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Program
from btrfs_ublk.base.process import run
from btrfs_ublk.bench import image_start
from btrfs_ublk.bench.bed import CURL
from btrfs_ublk.bench.image_start import (
    EROFS,
    EROFS_DRIVER,
    MKFS_EROFS,
    PIGZ,
    SKOPEO,
    UNTAR,
)
from btrfs_ublk.testing.registry import REGISTRY
from btrfs_ublk.units import KIB

BUSYBOX = Program("busybox", package="busybox-static")
LARGE_BYTES = 512 * KIB


@pytest.mark.device
@pytest.mark.timing  # what a lazy image fetches of itself meanwhile depends on time
def test_what_starts_move(need: Need, sparse_path: Path) -> None:
    need(ROOT, BTRFS, LOOP, EROFS_DRIVER, MKFS_EROFS)
    need(REGISTRY, SKOPEO, CURL, PIGZ, BUSYBOX)
    tree, tar = sparse_path / "tree", sparse_path / "tree.tar"
    (tree / "bin").mkdir(parents=True)
    subprocess.run(["cp", f"/bin/{BUSYBOX.program}", tree / "bin/true"], check=True)
    with (tree / "large").open("wb") as file:
        for _ in range(8):
            file.write(Path("/dev/urandom").open("rb").read(LARGE_BYTES))
    subprocess.run(["tar", "-cf", tar, "-C", tree, "."], check=True)
    argv = [sys.executable, "-m", "btrfs_ublk.bench.image_start", f"--tree={tar}"]
    argv += [f"--directory={sparse_path}", "--run=/bin/true", "--repeats=1", "--json"]
    document = json.loads(run([*argv, "--far", "2", "800"], timeout_s=240).stdout)
    found = {each["subject"]: each for each in document["results"]}
    assert UNTAR in found and EROFS in found and len(found) == 6
    assert found[UNTAR]["requests"] == 3
    assert found[UNTAR]["bytes"] > 8 * LARGE_BYTES
    # Of a start, the large file is no part.
    for name, each in found.items():
        assert each["seconds"] > each["limit_s"]
        assert each["bytes"] < found[UNTAR]["bytes"] / 2 or "image" not in name
    table, *waterfalls = image_start.tables(document)
    assert len(table.rows) == 6 and waterfalls[0].rows
