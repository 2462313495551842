"""Up and down many times, and interrupted at any moment, nothing stays."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.children import volumes
from support.needs import Need, share_of
from support.system_state import SystemState

from btrfs_ublk.base.capabilities import BTRFS, LOOP
from btrfs_ublk.base.gc import collect
from btrfs_ublk.server import FrontEndName

pytestmark = pytest.mark.timeout(900)

CYCLES = share_of(200)
INTERRUPTED_RUNS = share_of(50)
SEED = 20261120
CHILD_TIMEOUT_S = 120


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(BTRFS, LOOP)


def test_up_and_down_many_times(
    front_end: FrontEndName,
    sparse_path: Path,
    state_of_system: Callable[[], SystemState],
) -> None:
    before = state_of_system()
    for number in range(CYCLES):
        volumes.cycle(sparse_path, front_end)
        assert state_of_system() == before, f"after cycle {number}"


def start(where: Path, front_end: FrontEndName) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(volumes.__file__), str(where), front_end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def measured_cycle_s(where: Path, front_end: FrontEndName) -> float:
    """How long one cycle takes on this machine: when emulated, much longer."""
    with start(where, front_end) as process:
        assert process.stdout is not None
        moments_s = []
        for _ in range(4):
            process.stdout.readline()
            moments_s.append(time.monotonic())
        process.terminate()
        process.communicate(timeout=CHILD_TIMEOUT_S)
    return (moments_s[-1] - moments_s[0]) / (len(moments_s) - 1)


def test_interrupted_at_any_moment(
    front_end: FrontEndName,
    sparse_path: Path,
    state_of_system: Callable[[], SystemState],
) -> None:
    """By INT, TERM and KILL at random moments of the first two cycles, teardowns
    included, and now and then once more; after KILL, gc puts things right.
    """
    chances = random.Random(SEED)
    cycle_s = measured_cycle_s(sparse_path, front_end)
    before = state_of_system()
    for number in range(INTERRUPTED_RUNS):
        signum = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[number % 3]
        with start(sparse_path, front_end) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chances.uniform(0, 2 * cycle_s))
            process.send_signal(signum)
            if chances.random() < 0.4:  # an impatient user
                time.sleep(chances.uniform(0, cycle_s / 4))
                process.send_signal(signum)
            _, talk = process.communicate(timeout=CHILD_TIMEOUT_S)
        killed = signum == signal.SIGKILL
        assert process.returncode == (-signum if killed else 128 + signum), talk
        if killed:
            report = collect()
            assert report.is_clean, report.to_dict()
        assert state_of_system() == before, f"run {number}, {signum.name}: {talk}"
