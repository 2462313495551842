"""The command line: nouns, messages, exit statuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import PROJECT

import btrfs_ublk
from btrfs_ublk.base.capabilities import Helper
from btrfs_ublk.base.helpers import HELPERS, HELPERS_VARIABLE, MKSEED, SERVER


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_helper_tells_its_version(need: Need) -> None:
    project = PROJECT
    build = (project / "csrc/tools/meson.build").read_text()
    assert sorted(re.findall(r"executable\(\s*'([^']+)'", build)) == sorted(HELPERS)
    need(*(Helper(name) for name in HELPERS))
    done = run("--version", "--json")
    versions = json.loads(done.stdout)
    assert versions["helpers"] == dict.fromkeys(HELPERS, btrfs_ublk.__version__)
    assert versions["helpers_match"] is True


def test_helpers_of_another_version_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / SERVER
    server.write_text("#!/bin/sh\necho btrfs-ublk-server 0.0.1\n")
    server.chmod(0o755)
    monkeypatch.setenv(HELPERS_VARIABLE, str(tmp_path))
    text = run("--version").stdout
    assert f"0 of {len(HELPERS)} of this version" in text
    assert f"{SERVER}: 0.0.1" in text and f"{MKSEED}: not built" in text
    assert "pip install" in text


class TestSeedCreate:
    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(Helper(MKSEED))

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
