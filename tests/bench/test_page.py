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
from btrfs_ublk.bench.page.comparisons import (
    Finding,
    comparison_blocks,
    contests,
    judgements,
)
from btrfs_ublk.bench.page.inputs import DocumentData, labels_of, read_inputs
from btrfs_ublk.bench.page.plots import Rows, Scatter

pytestmark = pytest.mark.thorough

RESULTS = PROJECT / "benchmark_matrix_results"
Record = dict[str, Any]


def found_in(data: DocumentData) -> list[Finding]:
    return comparison_blocks(data)[1]


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
        (first, *_), count = (
            sorted(found_in(data), key=lambda x: -x.weight),
            4,
        )
        assert len(found_in(data)) == count
        assert (first.figure, first.interval) == ("1.50×", "1.50 – 1.50")
        assert first.headline == "ublk-clone against btrfs-brd: faster"
        assert "one at a time (psync)" in first.sentence
        assert "Published, on other hardware: 0.72." in first.sentence

    def test_other_units(self, tmp_path: Path) -> None:
        data = document_data(tmp_path / "x.json", bytes_comparison())
        contest, second = contests(data)
        assert (contest.rank, second.rank, second.title) == (0, 1, "ls -lR: Cold, ms")
        assert contest.measure.text(1234.5) == "1,234 MiB"
        assert not contest.measure.more_is_better
        assert contest.published("erofs", "xfs") == 2.0
        told = {each.headline for each in found_in(data)}
        assert told == {
            *("sprout against xfs: more", "sprout against erofs: more"),
            *("sprout against xfs: slower", "sprout against erofs: slower"),
        }
        page = build([data])
        rows, _ = [
            plot
            for plot in page.chapters[0].blocks[0].plots
            if isinstance(plot, Rows) and plot.ratios
        ]
        assert [line.published for line in rows.lines] == [2.0, None]
        assert "left is better" in rows.axis

    def test_words_say_no_more_than_is_sure(self, tmp_path: Path) -> None:
        """Six turns at least, and 5 %; by the rule of the tables beside them."""

        def words(turns: int, factor: float) -> str:
            made = comparison(
                peers=("loop", "ublk"),
                workloads=("randread-psync",),
                factors={"ublk": factor},
                turns=turns,
            )
            data = document_data(tmp_path / "x.json", made)
            (one,) = judgements(list(contests(data)))
            (row,) = (table for table in data.tables if "psync" in table.title)
            assert row.rows[1][5] in (one.words, "same", "too few turns")
            return one.words

        assert words(6, 1.5) == "faster" and words(6, 0.5) == "slower"
        assert words(5, 1.5) == "faster?"
        assert words(9, 1.04) == words(9, 0.96) == "no sure difference"

    def test_no_turn_in_common(self, tmp_path: Path) -> None:
        made = comparison(turns=2)
        for result in made["results"]:
            if result["peer"] == "ublk-clone":
                result["run"] = "b"
        data = document_data(tmp_path / "x.json", made)
        assert not [x for x in found_in(data) if "ublk-clone" in x.headline]
        assert "no such turns" in render(build([data]), command="")

    def test_a_peer_that_was_never_measured(self, tmp_path: Path) -> None:
        made = comparison(turns=1)
        made["results"] = [
            each for each in made["results"] if each["peer"] != "btrfs-brd"
        ]
        data = document_data(tmp_path / "x.json", made)
        told = [(each.name, each.other) for each in judgements(list(contests(data)))]
        assert ("ublk-clone", "null_blk") in told

    def test_what_was_interrupted_says_so(self, tmp_path: Path) -> None:
        made = comparison(turns=1) | {"complete": False}
        page = page_of([write_document(tmp_path / "x.json", made)])
        assert page.chapters[0].labels == ["native", "interrupted"]

    def test_nothing_was_measured(self, tmp_path: Path) -> None:
        made = comparison(turns=0)
        page = page_of([write_document(tmp_path / "x.json", made)])
        text = render(page, command="")
        assert "There is nothing to compare" in text and "Not measured" in text


class TestSummary:
    def test_what_counts_comes_first(self, tmp_path: Path) -> None:
        """Ours against others; then others; then what was emulated, or
        disturbed.
        """
        named: list[tuple[str, Record]] = [
            ("emulated", comparison(environment=record(guest="tcg"))),
            ("busy", comparison(other_cores=1.0)),
            ("others", comparison(peers=("loop", "null_blk"))),
            ("ours", comparison()),
        ]
        paths = [write_document(tmp_path / f"{x}.json", made) for x, made in named]
        page = page_of(paths)
        anchors = [chapter.anchor for _, chapter in page.findings]
        assert list(dict.fromkeys(anchors))[:2] == ["ours", "others"]
        assert set(anchors[anchors.index("others") + 1 :]) <= {
            "others",
            "busy",
            "emulated",
        }
        assert len(anchors) == 6
        kinds = [section.labels for section in page.sections]
        assert kinds[0] == ["native"] and kinds[-1] == ["emulated"]

    def test_too_few_turns_are_no_finding(self, tmp_path: Path) -> None:
        page = page_of([write_document(tmp_path / "x.json", comparison(turns=1))])
        assert not page.findings

    def test_it_begins_with_plots_of_quiet_machines(self, tmp_path: Path) -> None:
        names = ("compare-fuse", "fetching", "compare-write-lazy", "lazy-memory")
        found = [path for name in names for path in RESULTS.glob(f"*-2cpu/{name}.json")]
        page = page_of([RESULTS / "vm-icount" / "compare-write-lazy.json", *found])
        assert [chapter.anchor for _, chapter in page.stories] == list(names)
        text = render(page, command="")
        assert text.index('class="plots stories"') < text.index('class="findings"')
        for name in names:
            assert f'href="#{name}"' in text
        assert not page_of([RESULTS / "vm-icount" / "compare-write-lazy.json"]).stories

    def test_a_long_table_does_not_stand_before_plots(self) -> None:
        (data,) = read_inputs([RESULTS / "busy-2cpu" / "compare-virtiofs.json"])
        blocks = build([data]).chapters[0].blocks
        assert not [table for table in blocks[0].tables if len(table.rows) > 15]
        assert blocks[0].plots


class TestMatrices:
    def test_every_run_is_a_point(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "m.jsonl", matrix_lines("full", blocks=2))
        page = page_of([path])
        plots = page.chapters[0].blocks[0].plots
        scaling = [x for x in plots if isinstance(x, Scatter) and x.x_ticks]
        (cost,) = [x for x in plots if isinstance(x, Scatter) and not x.x_ticks]
        (gains,) = [plot for plot in plots if isinstance(plot, Rows)]
        assert len(scaling) == 4
        assert sum(len(s.points) for plot in scaling for s in plot.series) == 192
        assert sum(len(series.points) for series in cost.series) == 192
        assert {tuple(plot.x_ticks) for plot in scaling} == {(1.0, 2.0, 6.0, 12.0)}
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
        told = [x.headline for x, _ in page.findings if "io_uring" in x.headline]
        assert told == ["io_uring: 2 jobs read 0.84× what one reads"]

    def test_runs_that_do_not_count_are_no_points(self, tmp_path: Path) -> None:
        lines = matrix_lines("quick", blocks=3, keep=0.7)
        good = sum(line.get("status") == "ok" for line in lines)
        page = page_of([write_lines(tmp_path / "m.jsonl", lines)])
        block = page.chapters[0].blocks[0]
        (cost,) = [x for x in block.plots if x.title == "What reads cost"]
        assert isinstance(cost, Scatter)
        assert sum(len(series.points) for series in cost.series) == good < 51
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
