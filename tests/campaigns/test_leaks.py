"""What the campaign of leaks (campaigns/leaks.py) expects, and how it goes on."""

import json
import math
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from call_events import CALL_EVENTS
from leak_scenes import Scene, Step, Words
from leaks import Call, Campaign, Runner, State
from support.needs import Need
from support.paths import PROJECT
from support.registry import REGISTRY

from btrfs_ublk.base.capabilities import FUSE

TIMEOUT_S = 280


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

    def calls(self, words: Words) -> list[Call]:
        self.run(words)
        return [Call("close", 1)]

    def rest(self) -> State:
        return tuple(sorted(self.there))

    def settled(self, *_: State) -> State:
        return self.rest()


def test_what_was_fetched_stays_when_the_signal_came_too_late() -> None:
    scene = Scene(("up",), [("down",), ("collect",)], collect=[("collect",)])
    campaign = Campaign(Fetching(), lambda: [], random.Random(1), None)
    rounds = list(campaign.run(scene, 100, math.inf))
    assert len(rounds) == 8  # each of four signals, to the process and to the group
    assert [fault for each in rounds for fault in each.faults] == []


@pytest.mark.device
@pytest.mark.fuse
def test_a_point_is_repeated(sparse_path: Path, need: Need) -> None:
    need(FUSE, CALL_EVENTS, REGISTRY)
    output = sparse_path / "results.json"
    point = "--at=SIGTERM to the group at openat 1"
    done = subprocess.run(
        [PROJECT / "scripts/torture", "leaks", "--parent", sparse_path, point]
        + ["--kind=seed create", "--rounds=2", "-o", output],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    rounds = json.loads(output.read_text())["results"]
    where = {"call": "openat 1", "signal": "SIGTERM", "group": True}
    result = {"kind": "seed create", "problems": []} | where
    assert rounds == [result] * 2
