"""The commands and scripts that run a matrix, with and without fio."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.needs import Need
from support.pages import full_row, runs_in
from support.paths import PROJECT
from support.system_state import SystemState

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, Fio, Helper
from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.helpers import MKSEED, SERVER
from btrfs_ublk.bench.commands.matrix import command
from btrfs_ublk.bench.config import Configuration
from btrfs_ublk.bench.environment import environment_id
from btrfs_ublk.bench.matrices import MATRICES
from btrfs_ublk.bench.run import Row
from btrfs_ublk.errors import CapabilityError

pytestmark = pytest.mark.thorough

PATIENCE_S = 120.0
SCRIPTS = PROJECT / "scripts"


class TestCommand:
    def test_the_script(self, tmp_path: Path) -> None:
        """It makes the runs of the matrix, in its order, with whatever runs one."""
        options = ["--matrix", "quick", "--print-script", "--max-repeats", "3"]
        done = CliRunner().invoke(command, [*options, "--filter", "fio.engine=psync"])
        assert done.exit_code == 0, done.output
        script, fake = tmp_path / "script", tmp_path / "fake"
        script.write_text(done.stdout)
        fake.write_text('#!/bin/sh\n[ "$1" = --json-opts ] && echo "$2"\n')
        fake.chmod(0o755)
        ran = subprocess.run(
            ["sh", script],
            env=os.environ | {"BENCHMARK": str(fake)},
            capture_output=True,
            text=True,
            check=True,
        )
        made = [Configuration.from_json(line) for line in ran.stdout.splitlines()]
        matrix = MATRICES["quick"]
        assert made == [
            configuration
            for block in (1, 2, 3)
            for configuration in matrix.order(block, seed=1)
            if configuration.engine == "psync"
        ]
        assert len(made) == 15

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--matrix", "slow"], "'slow' is not one of"),
            (["--filter", "fio.engine"], "not KEY=VALUE"),
            (["--min-repeats", "9", "--max-repeats", "2"], "9 repeats at least"),
            (["--runtime", "0"], "0.0 is not in the range"),
        ],
    )
    def test_wrong_usage(self, words: list[str], message: str) -> None:
        done = CliRunner().invoke(command, [*words, "--print-script"])
        assert done.exit_code != 0
        assert message in done.output + str(done.exception)

    @pytest.mark.parametrize(
        ("status", "exit_code"),
        [("ok", 0), ("rejected", 1), ("void", 1), ("skipped", 3)],
    )
    def test_what_it_says(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        status: str,
        exit_code: int,
    ) -> None:
        module = "btrfs_ublk.bench.commands.matrix"

        class Fuse:
            name = "fuse"

        def run(configuration: Configuration, *, environment: Any, **_: object) -> Row:
            iops = None if status == "void" else 1234.0
            row = full_row(configuration, iops=iops, status=status)
            return row | {"environment": environment_id(environment)}

        monkeypatch.setattr(f"{module}.choose_front_end", lambda name: Fuse)
        monkeypatch.setattr(f"{module}.collect", lambda: None)
        monkeypatch.setattr(f"{module}.run_configuration", run)
        monkeypatch.setattr(Fio, "probe", lambda self: None)
        words = ["--matrix=quick", "--max-repeats=3", "--filter=fio.jobs=1"]
        path = tmp_path / "r"
        words += ["-o", str(path)]
        done = CliRunner().invoke(command, words, standalone_mode=False)
        assert done.return_value == exit_code, done.output
        assert done.stdout == "" and f"12 runs: 12 {status}" in done.stderr
        what = "1,234 IOPS" if status == "ok" else f"{status}: because"
        assert f"1 jobs, 2 queues: {what}" in done.stderr
        assert "12 of 12, block 3" in done.stderr and "0 s left" in done.stderr
        assert len(runs_in(path)) == 12

    @pytest.mark.device
    def test_no_fio_is_an_error(
        self, need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        need(FUSE)
        monkeypatch.setattr(Fio, "probe", lambda self: "it is not on PATH")
        path = tmp_path / "r"
        done = CliRunner().invoke(command, ["--front-end=fuse", "-o", str(path)])
        assert isinstance(done.exception, CapabilityError)
        assert "fio is needed here" in str(done.exception) and not path.exists()

    def test_the_scripts_are_these_commands(self) -> None:
        for script, noun in {
            "benchmark.py": "run",
            "benchmark_matrix.py": "matrix",
            "benchmark_matrix_summarize.py": "summarize",
        }.items():
            done = subprocess.run(
                [SCRIPTS / script, "--help"],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            assert done.returncode == 0, done.stderr
            assert f"Usage: btrfs-ublk bench {noun} " in done.stdout


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

    def test_interrupted_it_can_go_on(
        self,
        words: list[str],
        tmp_path: Path,
        state_of_system: Callable[[], SystemState],
    ) -> None:
        path = tmp_path / "results.jsonl"
        before = state_of_system()
        with subprocess.Popen(
            [*words, "-o", str(path)], stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("1 of 4"):
                    break
            time.sleep(0.7)
            process.send_signal(signal.SIGINT)
            _, talk = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, talk
        assert "the same command goes on" in talk and "Traceback" not in talk
        assert state_of_system() == before
        done = subprocess.run([*words, "-o", str(path)], timeout=240, check=False)
        assert done.returncode == 0 and len(keys_in(path)) == 4
