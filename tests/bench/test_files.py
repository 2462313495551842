"""The benchmarks' plans of files, the helper that makes them, and the checks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.needs import Need

from btrfs_ublk.base.capabilities import Helper
from btrfs_ublk.base.helpers import MAKE_FILES, helper_path
from btrfs_ublk.bench import files
from btrfs_ublk.bench.files import Plan, PlannedFile, make_files
from btrfs_ublk.bench.measurements.cloning import MAX_BYTES, MIN_BYTES, make_plan
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.units import GIB, MIB


def content(file_bytes: int) -> bytes:
    """Return what the helper writes, see set_up() in csrc/bench/make-files.c."""
    mask = (1 << 64) - 1
    return bytes((i * 2654435761 & mask) >> 13 & 0xFF for i in range(file_bytes))


class TestPlan:
    @given(st.integers(1, 100), st.integers(1, 9))
    def test_its_parts_are_all_of_it(self, count: int, processes: int) -> None:
        plan = Plan([0] * count, [1] * count)
        parts = plan.parts(processes)
        assert [number for part in parts for number in part] == list(range(count))
        lengths = {len(part) for part in parts}
        assert max(lengths) - min(lengths) <= 1
        sample = plan.sample(processes)
        assert len(sample) == min(count, processes)
        assert len({file.number for file in sample}) == len(sample)

    def test_where_its_files_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "FILES_PER_DIRECTORY", 3)
        plan = Plan(range(10), [4096] * 10)
        paths = [str(plan.path(Path("d"), number, processes=2)) for number in range(10)]
        assert paths[:5] == ["d/0/0/0", "d/0/0/1", "d/0/0/2", "d/0/1/3", "d/0/1/4"]
        assert paths[5:] == ["d/1/0/0", "d/1/0/1", "d/1/0/2", "d/1/1/3", "d/1/1/4"]
        with pytest.raises(IndexError):
            plan.path(Path("d"), 10, processes=2)

    def test_offsets_and_sizes_belong_together(self) -> None:
        assert Plan([5], [7]).sample(1) == [PlannedFile(0, 5, 7)]

    def test_clones_stay_where_they_should(self) -> None:
        planned = make_plan(2000, extent_bytes=16 * MIB).sample(2000)
        assert planned == make_plan(2000, extent_bytes=16 * MIB).sample(2000)
        assert all(MIN_BYTES <= file.size <= MAX_BYTES for file in planned)
        assert all(file.offset % 4096 == 0 for file in planned)
        assert any(file.size % 4096 for file in planned)
        ends = [file.offset + -(-file.size // 4096) * 4096 for file in planned]
        assert 8 * MIB < max(ends) <= 16 * MIB
        follow = sum(a == file.offset for a, file in zip(ends, planned[1:]))
        # All but where it starts again from the beginning.
        assert 1980 < follow < 1999


class TestMakeFiles:
    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(Helper(MAKE_FILES))

    @pytest.mark.parametrize("processes", [1, 2, 3])
    def test_it_makes_what_is_planned(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
    ) -> None:
        monkeypatch.setattr(files, "FILES_PER_DIRECTORY", 7)
        sizes = [1 + number * 100 for number in range(50)]
        plan = Plan([0] * 50, sizes)
        record = make_files(tmp_path, plan, operation="write", processes=processes)
        for number, size in enumerate(sizes):
            path = plan.path(tmp_path, number, processes=processes)
            assert path.read_bytes() == content(size)
        assert sum(len(names) for _, _, names in os.walk(tmp_path)) == 50
        assert record["files"] == 50 and record["processes"] == processes
        assert 0 < record["p50_us"] <= record["p99_us"] <= record["max_us"]
        assert 0 < record["rate"] < 50e6
        assert record["wall_s"] * 1e6 >= record["max_us"]

    def test_an_error_names_the_file_and_the_step(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(bytes(4096))
        target = tmp_path / "target"
        target.mkdir()
        with pytest.raises(BtrfsUblkError, match="file 0 in .*/target/0: FICLONERANGE"):
            make_files(
                target, Plan([0], [1 << 20]), operation="clone", sources=[source]
            )
        missing = tmp_path / "missing"
        (tmp_path / "other").mkdir()
        with pytest.raises(
            BtrfsUblkError, match="ready.*\n.*error: .*missing: No such"
        ):
            make_files(
                *(tmp_path / "other", Plan([0], [1])),
                operation="clone",
                sources=[missing],
            )

    def test_a_file_of_a_plan_has_its_limit(self, tmp_path: Path) -> None:
        with pytest.raises(BtrfsUblkError, match="a file of the plan"):
            make_files(tmp_path, Plan([0], [GIB]), operation="write")

    @pytest.mark.parametrize(
        "words",
        [
            [],
            ["clone"],
            ["nothing"],
            ["--count=x", "write"],
            ["--nothing"],
            ["--directory=d", "--plan-fd=3", "--start-fd=4", "--count=1", "write"],
            [
                *("--directory=d", "--plan-fd=3", "--start-fd=4", "--count=1"),
                *("--files-per-directory=1", "clone"),
            ],
        ],
    )
    def test_wrong_usage_touches_nothing(
        self, tmp_path: Path, words: list[str]
    ) -> None:
        done = subprocess.run(
            [helper_path(MAKE_FILES), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 2 and MAKE_FILES in done.stderr
        assert not list(tmp_path.iterdir()) and not done.stdout

    def test_it_does_nothing_when_whoever_drives_it_is_gone(
        self, tmp_path: Path
    ) -> None:
        plan = tmp_path / "plan"
        plan.write_bytes(Plan([0], [1]).to_bytes())
        (tmp_path / "target").mkdir()
        with plan.open("r+b") as file, open(os.devnull, "rb") as start:
            done = subprocess.run(
                [
                    *(helper_path(MAKE_FILES), f"--directory={tmp_path}/target"),
                    *(f"--plan-fd={file.fileno()}", f"--start-fd={start.fileno()}"),
                    *("--count=1", "--files-per-directory=1", "write"),
                ],
                pass_fds=[file.fileno(), start.fileno()],
                capture_output=True,
                text=True,
                timeout=30,
            )
        assert done.returncode == 1 and done.stdout == "ready\n"
        assert "--start-fd: Broken pipe" in done.stderr
        assert not list((tmp_path / "target").iterdir())
