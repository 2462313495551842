"""Sessions of the pytest plugin's users that are interrupted leave nothing behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.needs import Need, share_of
from support.system_state import SystemState
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, UBLK
from btrfs_ublk.server import FrontEndName

#: Everything is up, of each scope; again and again, until a signal.
PROJECT = """
import pytest

DATA = bytes(range(256)) * 1000

@pytest.fixture(scope="session")
def volume(btrfs_ublk_volume_factory_session, btrfs_ublk_range_server_session):
    url = btrfs_ublk_range_server_session.put("data", DATA)
    return btrfs_ublk_volume_factory_session(files={"data": url})

@pytest.mark.parametrize("number", range(500))
def test_it(number, volume, btrfs_ublk_loop_factory, btrfs_ublk_device_module,
            btrfs_ublk_volume, request):
    loop = btrfs_ublk_loop_factory(1 << 20)
    with (request.config.rootpath / "up").open("a") as file:
        file.write(".")
    with (volume.target / "data").open("r+b") as file:
        assert file.read() == DATA
        file.write(b"more")
    with open(loop.path, "r+b") as device:
        device.write(bytes(4096))
    assert btrfs_ublk_device_module.stats().errors == 0
"""
TIMEOUT_S = 120
SEED = 20261120
RUNS = share_of(100)


@contextmanager
def session(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run of pytest in a process group of its own, as a terminal makes it."""
    (directory / "test_it.py").write_text(PROJECT)
    (directory / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *options]
    with subprocess.Popen(
        command,
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process


def wait_until_up(directory: Path, times: int = 1) -> None:
    """Until that many tests have all that they need."""
    up = directory / "up"
    wait_until(
        lambda: up.exists() and up.stat().st_size >= times,
        "no session came up",
        timeout_s=TIMEOUT_S,
    )


def assert_soon(
    state: Callable[[], SystemState], before: SystemState, run: str
) -> None:
    """A killed session's guardian takes the time that it needs."""
    wait_until(
        lambda: state() == before,
        lambda: f"{run}\nleft: {state()}\nbefore: {before}",
        timeout_s=TIMEOUT_S,
    )


def end_of(process: subprocess.Popen[str]) -> str:
    """What it said. Workers have the same stderr: they are gone as well then."""
    return process.communicate(timeout=TIMEOUT_S)[1]


@pytest.mark.parametrize(
    ("front_end", "signum"),
    [
        pytest.param("fuse", signal.SIGINT, marks=pytest.mark.device),
        pytest.param("fuse", signal.SIGTERM, marks=pytest.mark.device),
        pytest.param("fuse", signal.SIGKILL, marks=pytest.mark.device),
        pytest.param("ublk", signal.SIGTERM, marks=pytest.mark.ublk),
    ],
)
def test_an_interrupted_session_takes_all_down(
    front_end: FrontEndName,
    need: Need,
    tmp_path: Path,
    state_of_system: Callable[[], SystemState],
    signum: signal.Signals,
) -> None:
    """A hasty user's as well: the second signal comes while pytest tears down. One that
    is killed has a guardian.
    """
    need(BTRFS, LOOP, UBLK if front_end == "ublk" else FUSE)
    before = state_of_system()
    with session(tmp_path, f"--btrfs-ublk-front-end={front_end}") as process:
        wait_until_up(tmp_path)
        process.send_signal(signum)
        if signum == signal.SIGINT:
            time.sleep(0.1)
            process.send_signal(signum)
        said = end_of(process)
    assert process.returncode in (pytest.ExitCode.INTERRUPTED, -signum), said
    assert "left behind" not in said
    assert_soon(state_of_system, before, said)


@pytest.mark.device
@pytest.mark.timeout(3600)
def test_interrupted_at_any_moment(
    tmp_path: Path, state_of_system: Callable[[], SystemState]
) -> None:
    """By INT, of the whole group as terminals send it, and TERM; every fourth run with
    two workers. Some come before anything is up, some in the first teardowns.
    """
    chances = random.Random(SEED)
    started_s = time.monotonic()
    before = state_of_system()
    with session(tmp_path) as process:
        wait_until_up(tmp_path, 2)
        twice_s = time.monotonic() - started_s
        process.terminate()
        end_of(process)
    assert state_of_system() == before
    for number in range(RUNS):
        parallel = number % 4 == 3
        signum = (signal.SIGINT, signal.SIGTERM)[number // 2 % 2]
        with session(tmp_path, *(["-n2"] if parallel else ())) as process:
            time.sleep(chances.uniform(0, twice_s * (2 if parallel else 1)))
            impatient = 1 + (chances.random() < 0.3)
            for _ in range(impatient):
                if signum == signal.SIGINT and process.poll() is None:
                    os.killpg(process.pid, signum)
                else:
                    process.send_signal(signum)
                time.sleep(chances.uniform(0, 0.3) * (impatient - 1))
            said = end_of(process)
        assert process.returncode != 0, said
        assert "left behind" not in said, f"run {number}, {signum.name}: {said}"
        assert_soon(state_of_system, before, f"run {number}, {signum.name}: {said}")
