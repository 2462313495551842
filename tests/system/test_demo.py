"""The demo, with names that get into each other's way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk.base.capabilities import BTRFS, LOOP
from btrfs_ublk.demo import Steps, _clones, _second_act
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.testing.registry import REGISTRY
from btrfs_ublk.units import GIB

NAMES = ["start", "middle", "end", "twin", "virtual", "file"]


@pytest.mark.parametrize("virtual", NAMES)
@pytest.mark.parametrize("file", NAMES)
def test_clones_have_names_of_their_own(
    tmp_path: Path, virtual: str, file: str
) -> None:
    path = tmp_path / file
    path.write_bytes(b"x")
    names = [clone.name for clone in _clones(GIB, path, taken={virtual})]
    assert len(set(names)) == 4 and not {virtual, "twin"} & set(names)


@pytest.mark.parametrize(("file", "virtual"), [("start", "twin"), ("twin", "end")])
def test_it_runs_through(
    need: Need, front_end: FrontEndName, sparse_path: Path, file: str, virtual: str
) -> None:
    need(BTRFS, LOOP)
    path = sparse_path / file
    path.write_bytes(os.urandom((17 << 20) + 5))  # more than one piece, and no block
    argv = [sys.executable, "-m", "btrfs_ublk.demo", "--virtual-data-size", "1T"]
    argv += ["--front-end", front_end]
    done = subprocess.run(
        [*argv, "--virtual-data-filename", virtual, "--file", path],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing is left" in done.stdout and "All checks passed" in done.stdout
    assert (REGISTRY.probe() is None) == ("What the image cost" in done.stdout)


def test_the_set_up_brings_all_that_is_shown() -> None:
    library = PROJECT / "scripts/lib/packages.sh"
    brought = subprocess.check_output(
        ["bash", "-euc", f". {library}; packages_of_part demo"], text=True
    )
    assert REGISTRY.package in brought.split()


def test_an_image_needs_a_registry(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _second_act(Steps(), tmp_path, "auto") is None
    words = capsys.readouterr().out.split()
    assert words[:4] == ["No", "image", "is", "shown:"]
    assert words[-4:] == ["install", "the", "package", "docker-registry"]
