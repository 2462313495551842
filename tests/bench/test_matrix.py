"""The matrix: which runs, in which order, how often; its file."""

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pages import ENVIRONMENT, full_row, runs_in

from btrfs_ublk.bench.commands.matrix import Progress, Runner
from btrfs_ublk.bench.config import Configuration, configuration_of
from btrfs_ublk.bench.matrices import MATRICES, Matrix, parse_filters
from btrfs_ublk.bench.results import open_results
from btrfs_ublk.bench.run import Row
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.mount import mounted

QUICK = MATRICES["quick"].with_options(front_end="fuse")


class TestMatrices:
    def test_the_full_one(self) -> None:
        full = MATRICES["full"]
        assert len(set(full.configurations)) == len(full.configurations) == 96
        assert full.least >= 10 and full.most == 30
        assert {each.runtime_s for each in full.configurations} == {10}
        assert {each.direct for each in full.configurations} == {True}
        counts = Counter((each.engine, each.depth) for each in full.configurations)
        assert counts == {
            ("io_uring", 4): 24,
            ("io_uring", 16): 24,
            ("mmap", 8): 24,
            ("psync", 8): 24,
        }

    def test_each_block_has_all_in_an_order_of_its_own(self) -> None:
        orders = [QUICK.order(block, seed=5) for block in range(1, 5)]
        for order in orders:
            assert set(order) == set(QUICK.configurations)
            assert len(order) == len(QUICK.configurations)
        assert len({tuple(order) for order in orders}) == 4
        assert orders[0] == QUICK.order(1, seed=5) != QUICK.order(1, seed=6)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("fio.engine", "not KEY=VALUE"),
            ("engine=psync", "there is no key 'engine'"),
            ("fio.jobs=many", "fio.jobs is 'many'"),
        ],
    )
    def test_wrong_filters(self, text: str, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            parse_filters([text])


def rows(*iops: float | str) -> list[Row]:
    return [
        (
            {"status": value, "total_iops": None}
            if isinstance(value, str)
            else {"status": "ok", "total_iops": value}
        )
        for value in iops
    ]


SMALL = Matrix("small", QUICK.configurations[:4], least=2, most=6)


def run_all(
    path: Path,
    measure: Callable[[Configuration], Row],
    *,
    matrix: Matrix = SMALL,
    stop_after: int = 1000,
    **options: Any,
) -> list[Progress]:
    """Go on with a file; stop as a kill would, between two runs."""
    with open_results(path, matrix, seed=1) as results:
        runner = Runner(
            matrix,
            results,
            environment=ENVIRONMENT,
            seed=1,
            tolerance=0.03,
            measure=measure,
            **({"selected": matrix.configurations} | options),
        )
        steps = []
        for step in runner.run():
            steps.append(step)
            if step.row is not None:
                stop_after -= 1
                if stop_after == 0:
                    break
        return steps


class Machine:
    """Its figures depend on nothing but the configuration and how often it ran."""

    def __init__(self, noisy: Configuration | None = None) -> None:
        self.noisy = noisy
        self.count: Counter[Configuration] = Counter()

    def __call__(self, configuration: Configuration) -> Row:
        self.count[configuration] += 1
        noise = random.Random(self.count[configuration]).uniform(0.5, 2)
        factor = noise if configuration == self.noisy else 1.0
        return full_row(configuration, iops=1000.0 * factor)


class TestRunner:
    def test_a_steady_matrix_takes_the_least(self, tmp_path: Path) -> None:
        steps = run_all(tmp_path / "r", Machine())
        runs = runs_in(tmp_path / "r")
        assert len(runs) == 8 and len({run["key"] for run in runs}) == 8
        for block in (1, 2):
            order = [configuration_of(r) for r in runs if r["block"] == block]
            assert order == SMALL.order(block, seed=1)
        assert [step.done for step in steps] == list(range(9))
        assert {step.planned for step in steps} == {8} and steps[-1].left_s == 0

    @pytest.mark.parametrize("torn", [False, True])
    def test_killed_twice_it_has_the_same_runs(
        self, tmp_path: Path, torn: bool
    ) -> None:
        noisy = SMALL.configurations[2]
        run_all(tmp_path / "whole", Machine(noisy))
        machine, path = Machine(noisy), tmp_path / "killed"
        for stop_after in (3, 6, 1000):
            run_all(path, machine, stop_after=stop_after)
            if torn and stop_after < 1000:
                # The kill came while the last line was written.
                text = path.read_bytes()
                last = configuration_of(runs_in(path)[-1])
                machine.count[last] -= 1
                path.write_bytes(text[:-20])
        assert path.read_bytes() == (tmp_path / "whole").read_bytes()


class TestResults:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "results.jsonl"
        run_all(path, Machine())
        return path

    def test_each_run_is_on_disk_before_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[int] = []
        real = os.fsync

        def fsync(fd: int) -> None:
            synced.append(os.fstat(fd).st_size)
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        path = tmp_path / "r"
        sizes = []

        def measure(configuration: Configuration) -> Row:
            sizes.append(path.stat().st_size)
            return full_row(configuration)

        run_all(path, measure)
        assert len(sizes) == 8 and set(sizes) <= set(synced)

    def test_a_torn_line_is_dropped(self, path: Path) -> None:
        whole = path.read_bytes()
        for tail in (b'{"kind": "run", "key', b"{}", b"\0\0\0"):
            path.write_bytes(whole + tail)
            with open_results(path, SMALL, seed=1) as results:
                assert len(results.rows) == 8
            assert path.read_bytes() == whole

    @pytest.mark.parametrize(
        ("number", "line", "message"),
        [
            (3, "not JSON", "line 3 is no JSON: 'not JSON'"),
            (3, "[]", "line 3 is not of a matrix"),
            (2, '{"total_iops": 3}', "line 2 is not of a matrix"),
            (2, '{"kind": "matrix"}', "line 2 is of the kind matrix"),
            (4, '{"kind": "run", "status": "ok"}', "line 4 is not a run"),
            (1, '{"kind": "environment"}', "line 1 is of the kind environment"),
        ],
    )
    def test_a_foreign_line_is_named(
        self, path: Path, number: int, line: str, message: str
    ) -> None:
        lines = path.read_text().splitlines()
        lines.insert(number - 1, line)
        before = "\n".join(lines) + "\n"
        path.write_text(before)
        with pytest.raises(UsageError, match=message):
            with open_results(path, SMALL, seed=1):
                pass
        assert path.read_text() == before

    @pytest.mark.parametrize(
        ("matrix", "seed", "message"),
        [
            (QUICK, 1, "line 1 is of another matrix: its matrix is 'small'"),
            (SMALL, 2, "its seed is 1, not 2"),
            (
                SMALL.with_options(front_end="ublk"),
                1,
                "its front_end is 'fuse', not 'ublk'",
            ),
            (
                SMALL.with_options(front_end="fuse", runtime_s=9.0),
                1,
                "its fio.runtime is 2, not 9",
            ),
            (Matrix("small", QUICK.configurations[:3], 2, 6), 1, "its fingerprint is"),
        ],
    )
    def test_another_matrix_is_refused(
        self, path: Path, matrix: Matrix, seed: int, message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            with open_results(path, matrix, seed=seed):
                pass

    def test_one_writer_at_a_time(self, path: Path) -> None:
        with open_results(path, SMALL, seed=1):
            with pytest.raises(BtrfsUblkError, match="another process"):
                with open_results(path, SMALL, seed=1):
                    pass

    @pytest.mark.device
    def test_on_a_full_disk_it_stops_and_goes_on(self, tmp_path: Path) -> None:
        machine = Machine()

        def measure(configuration: Configuration) -> Row:
            return machine(configuration) | {"reason": "long " * 200}

        size = ["size=4k"]  # the first line and some runs
        with mounted("tmpfs", tmp_path, fs_type="tmpfs", options=size) as disk:
            path = tmp_path / "results.jsonl"
            with pytest.raises(BtrfsUblkError, match="results.jsonl: No space") as info:
                run_all(path, measure)
            assert "goes on" in str(info.value.hint)
            assert 1 < machine.count.total() < 8
            disk.remount(options=["size=1m"])
            run_all(path, measure)
            # The run whose line did not fit is made again.
            assert len(runs_in(path)) == 8 and machine.count.total() == 9
