"""The command line: nouns, messages, exit statuses."""

from __future__ import annotations

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
from btrfs_ublk.server import Description, LazySegment


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

    def test_description_of_a_lazy_device(self, sparse_path: Path) -> None:
        image, path = sparse_path / "seed.img", sparse_path / "device.json"
        options = ("--virtual-data-size", "1T", "--metadata-only")
        where = ("--description", path, "--map", sparse_path / "map")
        done = run("seed", "create", image, *options, *where)
        assert done.returncode == 0, done.stderr
        description = Description.from_json(path.read_text())
        (lazy,) = [x for x in description.segments if isinstance(x, LazySegment)]
        assert lazy.map == str(sparse_path / "map") and lazy.cache is None
        assert lazy.length == 1 << 40 and lazy.map_offset == 0
        image.unlink()
        done = run("seed", "create", image, *options, *where)
        assert done.returncode == 2 and "device.json exists" in done.stderr
        nowhere = ("--description", sparse_path / "no" / "x.json", *where[2:])
        done = run("seed", "create", image, *options, *nowhere)
        assert done.returncode == 1 and "cannot write" in done.stderr
        done = run("seed", "create", image, *options, *where[2:])
        assert done.returncode == 2 and "need each other" in done.stderr
        another = ("--description", sparse_path / "x.json", *where[2:], "--cache", path)
        done = run("seed", "create", image, *options, *another)
        assert done.returncode == 2
        assert f"cache {path} is not a directory" in done.stderr
        assert list(sparse_path.iterdir()) == [path]

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
