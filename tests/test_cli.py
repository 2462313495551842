"""The command line: nouns, messages, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Need

import btrfs_ublk
from btrfs_ublk.capabilities import Helper
from btrfs_ublk.helpers import MKSEED


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version_and_help() -> None:
    assert btrfs_ublk.__version__ in run("--version").stdout
    text = run("--help").stdout
    assert "gc" in text and "seed" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments", [["no-such-noun"], ["gc", "--no-such-option"], ["seed", "create"]]
)
def test_wrong_usage_is_status_2_on_stderr(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == "" and "Error" in done.stderr


class TestSeedCreate:
    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(Helper(MKSEED))

    def test_json(self, sparse_path: Path) -> None:
        path = sparse_path / "seed.img"
        done = run("seed", "create", path, "--virtual-data-size", "4E", "--json")
        assert done.returncode == 0, done.stderr
        seed = json.loads(done.stdout)
        assert seed["path"] == str(path)
        assert seed["virtual_data"]["size"] == 4 << 60

    def test_text(self, sparse_path: Path) -> None:
        done = run(
            *("seed", "create", sparse_path / "seed.img", "--metadata-only"),
            *("--virtual-data-size", "1G", "--virtual-data-filename", "-x"),
        )
        assert done.returncode == 0, done.stderr
        assert "1 GiB in -x" in done.stdout

    @pytest.mark.parametrize(
        ("size", "message"),
        [
            ("4X", "--virtual-data-size '4X' is not a size"),
            ("1000", "not a positive multiple of 4096"),
            ("4096", "size"),
            ("9E", "size"),
        ],
    )
    def test_wrong_sizes(self, sparse_path: Path, size: str, message: str) -> None:
        path = sparse_path / "seed.img"
        done = run("seed", "create", path, "--virtual-data-size", size)
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr
        assert list(sparse_path.iterdir()) == []

    def test_an_existing_file_is_kept(self, sparse_path: Path) -> None:
        path = sparse_path / "seed.img"
        path.write_text("precious")
        done = run("seed", "create", path)
        assert done.returncode == 1
        assert done.stderr == (
            f"btrfs-ublk: error: {path} exists\n"
            "  hint: choose another name, or replace it with --force\n"
        )
        assert path.read_text() == "precious"

    def test_a_missing_directory_is_named(self, sparse_path: Path) -> None:
        done = run("seed", "create", sparse_path / "none" / "seed.img")
        assert done.returncode == 1
        message, hint = done.stderr.splitlines()
        assert f"error: {sparse_path}/none/seed.img: " in message and "hint" in hint
