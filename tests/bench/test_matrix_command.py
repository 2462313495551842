"""The commands and scripts that run a matrix, with and without fio."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.needs import Need
from support.pages import runs_in
from support.system_state import SystemState

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, Fio, Helper
from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.helpers import MKSEED, SERVER

pytestmark = pytest.mark.thorough


@pytest.fixture
def words(need: Need, sparse_path: Path) -> list[str]:
    """The command of a matrix of four runs."""
    need(BTRFS, LOOP, FUSE, Fio("psync"), Helper(MKSEED), Helper(SERVER))
    return [
        *(sys.executable, "-m", "btrfs_ublk.cli.main", "bench", "matrix"),
        *("--matrix=quick", "--runtime=0.5", "--max-repeats=2", "--min-repeats=2"),
        *("--filter=fio.engine=psync", "--filter=btrfs.total_clone_size=2G"),
        *("--filter=btrfs.virtual_data_size=4E", "--front-end=fuse"),
        *("--parent", str(sparse_path)),
    ]


def keys_in(path: Path) -> list[str]:
    return sorted(run["key"] for run in runs_in(path))


@pytest.mark.device
class TestForReal:
    def test_killed_twice_it_has_the_same_runs(
        self,
        words: list[str],
        tmp_path: Path,
        state_of_system: Callable[[], SystemState],
    ) -> None:
        whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
        before = state_of_system()
        done = subprocess.run(
            [*words, "-o", str(whole)], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "" and "4 of 4, block 2" in done.stderr
        assert "4 runs: 4 ok" in done.stderr
        for number in (1, 2):
            with subprocess.Popen(
                [*words, "-o", str(killed)], stderr=subprocess.PIPE, text=True
            ) as process:
                assert process.stderr is not None
                for line in process.stderr:
                    if line.startswith(f"{number} of 4"):
                        break
                time.sleep(0.7)  # somewhere in the next run
                process.send_signal(signal.SIGKILL)
        done = subprocess.run(
            [*words, "-o", str(killed)], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert keys_in(killed) == keys_in(whole) and len(keys_in(whole)) == 4
        collect()
        assert state_of_system() == before
