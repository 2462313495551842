"""What btrfs' own tools do on a sprout, as docs/limits.md says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS_PROGS, Helper
from btrfs_ublk.base.helpers import MKSEED
from btrfs_ublk.kernel import loop_device
from btrfs_ublk.seed import make_seed
from btrfs_ublk.units import GIB
from btrfs_ublk.volume.sprout import Sprout, sprout

TIMEOUT_S = 120
SEED_BYTES = 3 * GIB


@pytest.fixture
def made(need: Need, sparse_path: Path) -> Iterator[Sprout]:
    """Of a seed whose virtual data do not fit on it."""
    need(BTRFS_PROGS, Helper(MKSEED))
    target = sparse_path / "mnt"
    target.mkdir()
    seed = make_seed(sparse_path / "seed.img", virtual_data_size=SEED_BYTES)
    with loop_device(seed.path, read_only=True) as device:
        with sprout(device.path, target, parent=sparse_path) as it:
            (target / "own").write_bytes(bytes(1 << 20))
            yield it


def btrfs(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["btrfs", *words], capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_of_an_unmounted_sprout(need: Need, sparse_path: Path) -> None:
    """Its subvolume is restored without the virtual file; nothing is repaired."""
    need(BTRFS_PROGS, Helper(MKSEED))
    target, found = sparse_path / "mnt", sparse_path / "found"
    target.mkdir()
    found.mkdir()
    seed = make_seed(sparse_path / "seed.img", virtual_data_size=SEED_BYTES)
    image = sparse_path / "writable.img"
    with image.open("xb") as file:
        file.truncate(GIB)
    with loop_device(seed.path, read_only=True) as device:
        with sprout(device.path, target, writable_file=image):
            (target / "own").write_bytes(b"mine")
        with loop_device(image) as writable:
            done = btrfs("restore", "--root", "256", writable.path, found)
            assert done.returncode == 0, done.stderr
            assert [path.name for path in found.iterdir()] == ["own"]
            assert btrfs("check", writable.path).returncode == 0
            done = btrfs("check", "--repair", "--force", writable.path)
            assert done.returncode == 1
            assert "with seed device is not supported" in done.stderr
            assert btrfs("check", writable.path).returncode == 0


def test_scrub(made: Sprout) -> None:
    """Of its own device it is of use; of the mount, it fails or complains."""
    done = btrfs("scrub", "start", "-B", made.writable.path)
    assert done.returncode == 0 and "no errors found" in done.stdout, done.stderr
    done = btrfs("scrub", "start", "-B", made.target)
    assert done.returncode == 1 and "Read-only file system" in done.stderr
    done = btrfs("scrub", "start", "-B", "-r", made.target)
    assert done.returncode == 3 and "uncorrectable errors" in done.stderr
    assert re.search(r"super=\d+ verify=\d+", done.stdout)
    done = btrfs("device", "stats", "--check", made.target)
    assert done.returncode == 0, done.stdout


def test_balance_relocates_virtual_data(made: Sprout) -> None:
    """There is no room for them, so it ends at once, and harms nothing."""
    for words in (["-d"], ["--full-balance"]):
        done = btrfs("balance", "start", *words, made.target)
        assert done.returncode != 0 and "No space left" in done.stderr, words
    for filtered in ("-dusage=50", "-m"):
        done = btrfs("balance", "start", filtered, made.target)
        assert done.returncode == 0, (filtered, done.stderr)
    assert (made.target / "own").read_bytes() == bytes(1 << 20)
