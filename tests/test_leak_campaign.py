"""What the campaign of leaks (campaigns/leaks.py) expects, and how it goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from call_events import CALL_EVENTS
from conftest import Need
from registry_server import REGISTRY

from btrfs_ublk.base.capabilities import FUSE

CAMPAIGN = Path(__file__).parent / "campaigns" / "leaks.py"
ISOLATE = Path(__file__).parents[1] / "scripts/isolate"
TIMEOUT_S = 280

pytestmark = [
    pytest.mark.native,
    pytest.mark.fuse,
    pytest.mark.timeout(TIMEOUT_S + 60),
]


def campaign(parent: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ISOLATE, sys.executable, CAMPAIGN, "--parent", parent, *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(FUSE, CALL_EVENTS, REGISTRY)


def test_a_point_is_repeated(sparse_path: Path) -> None:
    output = sparse_path / "results.json"
    done = campaign(
        *(sparse_path, "--kind=seed create", "--at=SIGTERM to the group at openat 1"),
        *("--rounds=2", "-o", str(output)),
    )
    assert done.returncode == 0, done.stderr
    rounds = json.loads(output.read_text())["results"]
    point = {"call": "openat 1", "signal": "SIGTERM", "group": True}
    assert rounds == [{"kind": "seed create"} | point] * 2
