"""The report's page, without a browser: what it reads, says, draws and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.pages import (
    bytes_comparison,
    comparison,
    document_data,
    matrix_lines,
    page_of,
    record,
    write_document,
    write_lines,
)
from support.paths import PROJECT

from btrfs_ublk.bench.page.build import build, render
from btrfs_ublk.bench.page.comparisons import contests
from btrfs_ublk.bench.page.inputs import labels_of

pytestmark = pytest.mark.thorough

RESULTS = PROJECT / "benchmark_matrix_results"
Record = dict[str, Any]


class TestLabels:
    @pytest.mark.parametrize(
        ("environment", "other_cores", "kinds"),
        [
            (record(), 0.0, ["native"]),
            (record(), 0.5, ["native", "busy"]),
            (record(load=[13.0, 1.0, 1.0]), 0.0, ["native", "busy"]),
            (record(load=[11.0, 1.0, 1.0]), 0.0, ["native"]),
            (record(guest="tcg"), 0.5, ["emulated", "busy"]),
            (record(guest="kvm"), 0.0, ["vm"]),
            # Its clock does not see what others do.
            (record(guest="icount", load=[99.0, 1.0, 1.0]), 2.0, ["icount"]),
        ],
    )
    def test_machines(
        self, tmp_path: Path, environment: Record, other_cores: float, kinds: list[str]
    ) -> None:
        made = comparison(environment=environment, other_cores=other_cores)
        data = document_data(tmp_path / "x.json", made)
        assert labels_of(data) == kinds

    def test_machines_are_not_mixed(self, tmp_path: Path) -> None:
        """Nor busy and quiet times of one; equal ones share a section."""
        changes: list[Record] = [{}, {"load": [50.0, 1.0, 1.0]}, {"cpus": 2}, {}]
        paths = [
            write_document(
                tmp_path / f"{number}.json",
                comparison(turns=2, environment=record(**change)),
            )
            for number, change in enumerate(changes)
        ]
        page = page_of(paths)
        assert [len(section.chapters) for section in page.sections] == [2, 1, 1]
        text = render(page, command="")
        assert text.count("Other programs ran meanwhile") == 2  # legend and section


class TestComparisons:
    def test_ratios_are_known(self, tmp_path: Path) -> None:
        data = document_data(tmp_path / "x.json", comparison())
        for contest in contests(data):
            found = contest.ratio("ublk-clone", "btrfs-brd")
            assert found.middle == pytest.approx(1.5)
            # All of one turn have the same luck, so pairs differ in nothing else.
            assert (found.low, found.high) == pytest.approx((1.5, 1.5))
            assert len(found.turns) == 8

    def test_other_units(self, tmp_path: Path) -> None:
        data = document_data(tmp_path / "x.json", bytes_comparison())
        contest, second = contests(data)
        assert (contest.rank, second.rank, second.title) == (0, 1, "ls -lR: Cold, ms")
        assert contest.measure.text(1234.5) == "1,234 MiB"
        assert not contest.measure.more_is_better
        assert contest.published("erofs", "xfs") == 2.0
        page = build([data])
        rows, _ = [plot for plot in page.chapters[0].blocks[0].plots if plot.ratios]
        assert [line.published for line in rows.lines] == [2.0, None]
        assert "left is better" in rows.axis

    def test_what_was_interrupted_says_so(self, tmp_path: Path) -> None:
        made = comparison(turns=1) | {"complete": False}
        page = page_of([write_document(tmp_path / "x.json", made)])
        assert page.chapters[0].labels == ["native", "interrupted"]

    def test_nothing_was_measured(self, tmp_path: Path) -> None:
        made = comparison(turns=0)
        page = page_of([write_document(tmp_path / "x.json", made)])
        text = render(page, command="")
        assert "Not measured" in text


class TestSummary:
    def test_it_begins_with_plots_of_quiet_machines(self, tmp_path: Path) -> None:
        names = ("compare-fuse", "fetching", "compare-write-lazy", "lazy-memory")
        found = [path for name in names for path in RESULTS.glob(f"*-2cpu/{name}.json")]
        page = page_of([RESULTS / "vm-icount" / "compare-write-lazy.json", *found])
        assert [chapter.anchor for _, chapter in page.stories] == list(names)
        text = render(page, command="")
        assert text.index('class="plots stories"') < text.index("What was measured")
        for name in names:
            assert f'href="#{name}"' in text
        assert not page_of([RESULTS / "vm-icount" / "compare-write-lazy.json"]).stories


class TestMatrices:
    def test_every_run_is_a_point(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "m.jsonl", matrix_lines("full", blocks=2))
        page = page_of([path])
        *plots, gains = page.chapters[0].blocks[0].plots
        assert [plot.title for plot in plots] == [
            *("io_uring ×16", "io_uring ×4", "mmap ×8", "psync ×8")
        ]
        points = [len(line.values) for plot in plots for line in plot.lines]
        assert sum(points) == 192 and len(points) == 16
        published = {line.name: line.published for line in gains.lines}
        assert published["psync, 12 jobs"] == pytest.approx(311 / 78)
        assert len(gains.lines) == 9

    def test_gains_are_of_like_configurations(self, tmp_path: Path) -> None:
        """The best of several configurations with two jobs, against the only one with
        one: that would be a gain where each of them loses.
        """
        lines = matrix_lines("quick", blocks=3)
        for line in lines:
            if line.get("kind") == "run" and line["fio.engine"] == "io_uring":
                jobs, clone = line["fio.jobs"], line["btrfs.total_clone_size"]
                rate = 100_000.0 if jobs == 1 else 84_000.0 if clone == "2G" else 126e3
                line["total_iops"] = rate
                line["job_iops"] = [rate / jobs] * jobs
        page = page_of([write_lines(tmp_path / "m.jsonl", lines)])
        gains = page.chapters[0].blocks[0].plots[-1]
        told = {line.name: line.text for line in gains.lines}
        assert told["io_uring, 2 jobs"] == "0.84×"

    def test_runs_that_do_not_count_are_no_points(self, tmp_path: Path) -> None:
        lines = matrix_lines("quick", blocks=3, keep=0.7)
        good = sum(line.get("status") == "ok" for line in lines)
        page = page_of([write_lines(tmp_path / "m.jsonl", lines)])
        block = page.chapters[0].blocks[0]
        points = [len(x.values) for plot in block.plots[:-1] for x in plot.lines]
        assert sum(points) == good < 51
        assert "rejected" in block.intro[0]

    def test_what_made_each_file(self, tmp_path: Path) -> None:
        icount = record(guest="icount")
        lines = matrix_lines("quick", blocks=2, environment=icount)
        tcg = comparison(environment=record(guest="tcg"))
        paths = [
            write_lines(tmp_path / "m.jsonl", lines),
            write_document(tmp_path / "c.json", tcg),
            RESULTS / "busy-2cpu" / "recovery-fuse.json",
        ]
        made_by = {x.data.name: x.made_by for x in page_of(paths).chapters}
        assert made_by["m.jsonl"] == (
            "scripts/vm --icount -- btrfs-ublk bench matrix",
            "matrix quick, seed 1, front_end fuse, source memset, fio.runtime 2",
        )
        assert made_by["c.json"] == (
            "scripts/vm -- btrfs-ublk bench compare",
            "turns 8, runtime_s 3.0, size_bytes 268435456, seed 1",
        )
        program, asked = made_by["recovery-fuse.json"]
        assert program == "tests/campaigns/recovery.py"
        assert asked == "front_end fuse, supervisor True, rounds 300, depth 64, seed 3"
