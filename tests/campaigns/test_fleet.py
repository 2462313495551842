"""The campaign of fleets (tests/campaigns/fleet.py) with four hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import TESTS
from support.waiting import wait_until
from support.web_servers import NGINX

from btrfs_ublk.base.capabilities import ROOT

pytestmark = pytest.mark.device

pytest.importorskip("pyroute2", reason="pyroute2 makes networks: scripts/setup --test")

FLEET = [sys.executable, str(TESTS / "campaigns/fleet.py")]
OPTIONS = ["--hosts=4", "--size=2M", "--rate=50M", "--cases=4"]


@pytest.fixture(autouse=True)
def needed(need: Need, sanitized_build: Path) -> None:
    need(NGINX, ROOT)


def test_four_hosts_and_a_ring_in_namespaces(tmp_path: Path) -> None:
    environment, output = os.environ | {"TMPDIR": str(tmp_path)}, tmp_path / "results"
    argv = [*FLEET, *OPTIONS, "-o", output]
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["results"]
    times = {row["case"]: row["origin_times"] for row in rows}
    cases = ["direct", "ring, cold", "ring, warm", "ring, warm, origin gone"]
    assert list(times) == cases
    assert not any(row["problems"] for row in rows)
    # Where there is no CPU, a host asks the origin.
    assert 4 <= times["direct"] < 4.5 and 1 <= times["ring, cold"] < 2
    assert times["ring, warm"] < 1


def test_a_fleet_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    fleet = subprocess.Popen(
        [*FLEET, *OPTIONS],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with fleet:
        try:
            assert fleet.stderr is not None
            assert fleet.stderr.readline() == b"direct\n"
        finally:
            fleet.kill()

    def has_ended() -> bool:
        with suppress(ProcessLookupError):
            os.killpg(fleet.pid, 0)
            return False
        return True

    # With its processes, its namespaces are gone.
    wait_until(has_ended)
