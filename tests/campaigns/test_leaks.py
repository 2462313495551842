"""What the campaign of leaks (campaigns/leaks.py) expects, and how it goes on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from call_events import CALL_EVENTS
from leak_scenes import Scene, Step, Words
from leaks import Call, Campaign, Runner, State
from support.needs import Need
from support.paths import PROJECT, TESTS
from support.registry import REGISTRY

from btrfs_ublk.base.capabilities import FUSE

CAMPAIGN = TESTS / "campaigns" / "leaks.py"
ISOLATE = PROJECT / "scripts/isolate"
TIMEOUT_S = 280

pytestmark = [
    pytest.mark.device,
    pytest.mark.fuse,
    pytest.mark.timeout(TIMEOUT_S + 60),
]


class Fetching(Runner):
    """Its commands do nothing, but "up" fetches a file, which "collect" removes; the
    signals come after all has been done."""

    def __init__(self) -> None:
        self.there: set[str] = set()

    def run(self, words: Words, *_: object, **__: object) -> tuple[int, str]:
        if words == ("up",):
            self.there |= {"volume", "file"}
        elif words == ("down",):
            self.there.discard("volume")
        elif words == ("collect",):
            self.there.discard("file")
        return 0, ""

    def do(self, steps: Sequence[Step]) -> None:
        for step in steps:
            assert not callable(step)
            self.run(step)

    def calls(self, words: Words, *, starting: bool) -> list[Call]:
        self.run(words)
        return [Call("close", 1)]

    def rest(self) -> State:
        return tuple(sorted(self.there))

    def settled(self, *_: State) -> State:
        return self.rest()


def test_what_was_fetched_stays_when_the_signal_came_too_late() -> None:
    scene = Scene(("up",), [("down",), ("collect",)], collect=[("collect",)])
    campaign = Campaign(Fetching(), lambda: [], 1, None)
    rounds = list(campaign.run(scene, 100, math.inf))
    assert len(rounds) == 8  # each of four signals, to the process and to the group
    assert [fault for each in rounds for fault in each.faults] == []


def campaign(
    parent: Path, *words: str, program: Sequence[str] = (str(CAMPAIGN),)
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ISOLATE, sys.executable, *program, "--parent", parent, *words],
        cwd=CAMPAIGN.parent,
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


def test_what_is_no_point(sparse_path: Path) -> None:
    done = campaign(sparse_path, "--kind=seed create", "--at=SIGTERM at nothing 1")
    assert done.returncode == 2 and "'SIGTERM at nothing 1' is none" in done.stderr


#: No kind gets any further than that.
_FAILING = """
import leaks
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.errors import BtrfsUblkError
def calls(*_, **__):
    raise BtrfsUblkError("it cannot")
leaks.Runner.calls = calls
run_command(leaks.command, name="leaks.py")
"""


def test_it_goes_on_after_a_kind_that_ended_early(sparse_path: Path) -> None:
    kinds = ["podman setup", "site-cache config"]
    words = [*(f"--kind={kind}" for kind in kinds), "--rounds=2"]
    done = campaign(sparse_path, *words, program=("-c", _FAILING))
    assert done.returncode == 1
    for kind in kinds:
        assert f"{kind}: ended early: it cannot" in done.stderr
    assert "0 rounds with seed 1" in done.stderr and " 2 failures" in done.stderr
