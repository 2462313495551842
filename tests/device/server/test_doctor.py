"""What the doctor says of this machine, and of poorer ones."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from btrfs_ublk.base.capabilities import (
    BTRFS,
    FUSE,
    LOOP,
    MOUNT,
    ROOT,
    UBLK,
    Helper,
)
from btrfs_ublk.base.helpers import MKSEED, SERVER


def _doctor(
    *arguments: str, program: tuple[str, ...] = ("-m", "btrfs_ublk.cli.main")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def _abilities(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(done.stdout)["abilities"]}


def test_it_says_what_the_probes_say() -> None:
    done = _doctor("--json")
    answers = {name: each["answer"] for name, each in _abilities(done).items()}
    there = {
        "seeds": [Helper(MKSEED)],
        "fuse": [ROOT, Helper(SERVER), FUSE, LOOP],
        "ublk": [ROOT, Helper(SERVER), UBLK],
        "mount": [ROOT, BTRFS, LOOP, MOUNT],
    }
    for name, needs in there.items():
        expected = all(need.probe() is None for need in needs)
        assert (answers[name] == "yes") is expected, name
    usable = json.loads(done.stdout)["usable"]
    assert done.returncode == (0 if usable else 3)
    front_ends = (answers["fuse"], answers["ublk"])
    assert usable is ("yes" in front_ends and answers["mount"] == "yes")
