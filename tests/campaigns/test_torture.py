"""scripts/torture, and the campaign of images in a short form."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from call_events import CALL_EVENTS
from support.cgroups import MEMORY_GROUPS
from support.containers import BUSYBOX, CONTAINERD, RUNC
from support.needs import Need
from support.paths import PROJECT
from support.registry import REGISTRY

from btrfs_ublk.base.capabilities import FUSE

TIMEOUT_S = 280


def torture(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROJECT / "scripts/torture", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_all_campaigns_are_listed() -> None:
    listed = [line.split()[0] for line in torture("--list").stdout.splitlines()]
    concluding = [
        path.stem.replace("_", "-")
        for path in sorted((PROJECT / "tests/campaigns").glob("*.py"))
        if re.search(r"campaign\.(conclude|Results)\(", path.read_text())
    ]
    assert listed == concluding and len(listed) > 5


def test_usage() -> None:
    done = torture("nothing")
    assert done.returncode == 2 and "there are: bad-inputs, " in done.stderr
    assert torture().returncode == 2
    for name in ("images", "power"):
        assert "--rounds" in torture(name, "--help").stdout


@pytest.mark.device
@pytest.mark.fuse
def test_killed_commands_of_images(sparse_path: Path, need: Need) -> None:
    need(FUSE, REGISTRY)
    output = sparse_path / "results.json"
    kinds = ["pull", "fork + commit", "registry during up", "daemon gets TERM"]
    done = torture(
        *("images", "--seed=5", "--rounds=4", *(f"--kind={kind}" for kind in kinds)),
        *("--parent", sparse_path, "-o", output),
    )
    assert done.returncode == 0, done.stderr
    assert "4 rounds with seed 5" in done.stderr and " 0 failures" in done.stderr
    rounds = json.loads(output.read_text())["results"]
    assert [each["kind"] for each in rounds] == kinds
    assert all(each["operations"] > 0 for each in rounds)


@pytest.mark.device
@pytest.mark.fuse
def test_commands_that_are_ended_at_their_system_calls(
    sparse_path: Path, need: Need
) -> None:
    """As far as they are quick; all others are for longer campaigns."""
    need(FUSE, CALL_EVENTS)
    output = sparse_path / "results.json"
    kinds = ["volume up, new", "device up", "seed create", "image build"]
    done = torture(
        *("leaks", "--seed=5", "--rounds=16", *(f"--kind={kind}" for kind in kinds)),
        *("--parent", sparse_path, "-o", output),
    )
    assert done.returncode == 0, done.stderr
    assert "16 rounds with seed 5" in done.stderr and " 0 failures" in done.stderr
    rounds = json.loads(output.read_text())["results"]
    assert {each["kind"] for each in rounds} == set(kinds)
    assert "KILL" in {each["signal"].removeprefix("SIG") for each in rounds}


@pytest.mark.device
@pytest.mark.fuse
def test_containers_do_not_notice_kills(sparse_path: Path, need: Need) -> None:
    need(FUSE, REGISTRY, CONTAINERD, RUNC, BUSYBOX)
    output = sparse_path / "results.json"
    kinds = ["snapshotter + servers", "daemon + containerd", "all get STOP", "upgrade"]
    done = torture(
        *("containers", "--seed=5", "--rounds=4", "--containers=3", "--writers=1"),
        *(f"--kind={kind}" for kind in kinds),
        *("--parent", sparse_path, "-o", output),
    )
    assert done.returncode == 0, done.stderr
    assert "4 rounds with seed 5" in done.stderr and " 0 failures" in done.stderr
    rounds = json.loads(output.read_text())["results"]
    assert [each["kind"] for each in rounds] == kinds
    assert all(each["operations"] for each in rounds)
    assert all(each["kills"] > 1 for each in rounds[:3])


@pytest.mark.device
@pytest.mark.fuse
def test_reads_under_load(sparse_path: Path, need: Need) -> None:
    need(FUSE, MEMORY_GROUPS)
    done = torture(
        *("load", "--devices=4", "--readers=16", "--clients=200", "--length=2"),
        *("--parent", sparse_path),
    )
    assert done.returncode == 0, done.stderr
    assert "6 rounds with seed 1" in done.stderr and " 0 failures" in done.stderr
    assert "the OOM killer took" in done.stderr
