"""The demo, with names that get into each other's way."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.devices import description_file
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP
from btrfs_ublk.demo import _clones
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.testing.registry import REGISTRY
from btrfs_ublk.units import GIB

NAMES = ["start", "middle", "end", "twin", "virtual"]


@pytest.mark.parametrize("virtual", NAMES)
def test_clones_have_names_of_their_own(virtual: str) -> None:
    names = [clone.name for clone in _clones(GIB, taken={virtual})]
    assert len(set(names)) == 3 and not {virtual, "twin"} & set(names)


@pytest.mark.parametrize("virtual", ["twin", "end"])
def test_it_runs_through(need: Need, front_end: FrontEndName, virtual: str) -> None:
    need(BTRFS, LOOP)
    argv = [sys.executable, "-m", "btrfs_ublk.demo", "--virtual-data-size", "1T"]
    argv += ["--front-end", front_end]
    done = subprocess.run(
        [*argv, "--virtual-data-filename", virtual],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing is left" in done.stdout and "All checks passed" in done.stdout
    assert (REGISTRY.probe() is None) == ("What the image cost" in done.stdout)


#: Has a device up in a mount namespace of its own, and runs a command in that of $PPID.
_BESIDE = """
"$1" -m btrfs_ublk.command device up other "$2" --front-end fuse || exit 99
nsenter --mount=/proc/$PPID/ns/mnt -- "$1" -m btrfs_ublk.demo --virtual-data-size 1T \\
    --front-end fuse
status=$?
"$1" -m btrfs_ublk.command device down other && exit $status
"""


@pytest.mark.device
def test_beside_a_daemon_in_another_mount_namespace(need: Need, tmp_path: Path) -> None:
    need(BTRFS, LOOP, FUSE)
    argv = ["unshare", "--mount", "--", "sh", "-c", _BESIDE, "sh", sys.executable]
    done = subprocess.run(
        [*argv, description_file(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing is left" in done.stdout
