"""The report's page, without a browser: what it reads, says, draws and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.pages import (
    comparison,
    document_data,
    matrix_lines,
    page_of,
    record,
    write_document,
    write_lines,
)

from btrfs_ublk.bench.page.build import render
from btrfs_ublk.bench.page.comparisons import contests

pytestmark = pytest.mark.thorough

Record = dict[str, Any]


class TestLabels:

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
