"""The summary of a matrix, of data whose answers are known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from btrfs_ublk.bench.config import Configuration
from btrfs_ublk.bench.matrices import MATRICES
from btrfs_ublk.bench.summarize import Figure, Part, parse_rows, summarize, tables
from btrfs_ublk.errors import UsageError

#: Known factors of a made-up machine: its IOPS are their product.
ENGINES = {"io_uring": 1000.0, "mmap": 500.0, "psync": 100.0}
DEPTHS = {4: 1.0, 8: 1.0, 16: 1.5}
SEEDS = {"fallocate": 0.9, "mega-extent": 1.0}
SIZES = {"275G": 1.0, "4E": 0.8}
CLONES = {"2G": 1.0, "200G": 0.7}
JOBS = {1: 1.0, 2: 1.9, 6: 4.0, 12: 3.5}
#: Of the four repeats, of which the 75th percentile is 1.25, the median 1.
REPEATS = (0.5, 1.0, 2.0, 1.0)

Row = dict[str, Any]


def iops(values: Row) -> float:
    return (
        ENGINES[values["fio.engine"]]
        * DEPTHS[values["fio.depth"]]
        * SEEDS[values["btrfs.seed"]]
        * SIZES[values["btrfs.virtual_data_size"]]
        * CLONES[values["btrfs.total_clone_size"]]
        * JOBS[values["fio.jobs"]]
    )


def original_rows() -> list[Row]:
    """Nine keys and the two results, and nothing else."""
    found = []
    for repeat in REPEATS:
        for configuration in MATRICES["full"].configurations:
            values = configuration.to_dict()
            del values["front_end"], values["source"]
            rate = iops(values) * repeat
            found.append(values | {"total_iops": rate, "job_iops": [rate]})
    return found


def figures(part: Part, title: str) -> dict[tuple[Any, ...], Figure]:
    for comparison, found in part.comparisons:
        if comparison.title.startswith(title):
            return {tuple(each.values.values()): each for each in found}
    raise AssertionError(title)


@pytest.fixture(scope="module")
def part() -> Part:
    (found,) = summarize(original_rows())
    return found


def test_what_is_printed_is_the_best_configurations_75th_percentile(
    part: Part,
) -> None:
    found = figures(part, "Seed, virtual data and clones")
    best = found["io_uring", "fallocate", "275G", "200G"]
    assert best.p75 == pytest.approx(1000 * 1.5 * 0.9 * 0.7 * 4 * 1.25)
    assert best.median == pytest.approx(1000 * 1.5 * 0.9 * 0.7 * 4)
    assert best.interval[0] < best.median < best.interval[1]
    assert (best.runs, best.configurations) == (4, 8)
    assert (best.best.depth, best.best.jobs) == (16, 6)


def row(**changed: Any) -> Row:
    configuration: Configuration = MATRICES["quick"].configurations[0]
    return (
        configuration.to_dict()
        | {"kind": "run", "status": "ok", "total_iops": 100.0, "environment": "e"}
        | changed
    )


def test_what_does_not_count_is_told() -> None:
    bad = {"total_iops": 9e9, "reason": "wrong data\n  hint: none"}
    (part,) = summarize(
        [row(), row(status="void", **bad), row(status="failed", **bad), row()]
    )
    for _, found in part.comparisons:
        assert {each.p75 for each in found} <= {100.0}
    assert part.reasons == {"void: wrong data": 1, "failed: wrong data": 1}
    *_, last = tables(part)
    assert last.title == "Runs that do not count"
    assert [tuple(each) for each in last.rows] == [
        ("void: wrong data", "1"),
        ("failed: wrong data", "1"),
    ]


def test_machines_front_ends_and_sources_are_not_mixed() -> None:
    parts = summarize(
        [
            row(),
            row(environment="f", total_iops=1.0),
            row(front_end="ublk", total_iops=2.0),
            row(source="pattern", total_iops=3.0),
        ]
    )
    names = [(part.environment, part.front_end, part.source) for part in parts]
    assert names == [
        ("e", "auto", "memset"),
        ("e", "auto", "pattern"),
        ("e", "ublk", "memset"),
        ("f", "auto", "memset"),
    ]
    tops = [figures(part, "Kind of seed")["io_uring", "mega-extent"] for part in parts]
    assert [top.p75 for top in tops] == [100.0, 3.0, 2.0, 1.0]


class TestParsing:
    def test_files_of_results_and_bare_rows(self) -> None:
        lines = [
            {"kind": "matrix", "version": 1},
            {"kind": "environment", "id": "e"},
            row(key="a", total_iops=1.0),
            row(key="b", total_iops=2.0),
            row(key="a", total_iops=3.0),
            original_rows()[0],
        ]
        text = "\n".join(map(json.dumps, lines)) + "\n\n"
        found = parse_rows(text)
        assert [each["total_iops"] for each in found.rows[:2]] == [3.0, 2.0]
        assert len(found.rows) == 3 and set(found.environments) == {"e"}
        assert not found.torn

    def test_a_torn_line_is_left_out(self) -> None:
        text = json.dumps(row()) + "\n" + json.dumps(row())[:-5]
        found = parse_rows(text)
        assert (found.rows, found.torn) == ([row()], True)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "there is no run"),
            ('{"kind": "matrix", "version": 1}\n', "there is no run"),
            ('{"kind": "matrix"}\n', "line 1 is of version None, not 1"),
            (
                json.dumps(row()) + '\n{"kind": "matrix", "version": 2}\n',
                "line 2 is of version 2, not 1",
            ),
            ('{"a": \n' + json.dumps(row()), "line 1 is no JSON"),
            (json.dumps(row()) + "\n[1]\n", "line 2 is no run"),
            ('{"kind": "suite"}\n', "line 1 is no run"),
            ('{"total_iops": 3}\n', "line 1 is no run: it has no btrfs.seed"),
            (json.dumps(row(**{"fio.jobs": "x"})) + "\n", "line 1: fio.jobs is 'x'"),
            (json.dumps(row(total_iops=None)) + "\n", "total_iops is None, not a rate"),
            (json.dumps(row(key=[])) + "\n", r"line 1: its key is \[\], not a text"),
            (json.dumps(row(total_iops="5")) + "\n", "total_iops is '5', not a rate"),
        ],
    )
    def test_other_lines_are_named(self, text: str, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            parse_rows(text)
