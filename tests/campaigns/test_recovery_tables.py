"""What the kills of servers are, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recovery import awkward_kinds, plan
from recovery_tables import (
    ADOPTED,
    BOTH,
    KINDS,
    RANDOM,
    STOPPED,
    TWICE,
    faults,
    tables,
)
from verified_reads import WrittenFiles

from btrfs_ublk.server import FrontEndName

READER = {
    **{"what": "reader", "name": "direct", "reads": 1000, "bytes": 5 << 30},
    **{"wrong_bytes": 0, "errors": 0, "hung": 0},
    **{"p50_ns": 1_000_000, "p99_ns": 2_500_000, "max_ns": 80_000_000},
    "pause_ns": 70_000_000,
}
WRITER = {"what": "writer", "files": 12, "errors": [], "max_s": 0.25}


def document(*results: dict[str, Any]) -> dict[str, Any]:
    parameters = {"front_end": "ublk", "supervisor": True, "raw": False}
    return {"parameters": parameters, "results": list(results)}


def rounds(kind: str, *times_s: float, kills: int = 1) -> list[dict[str, Any]]:
    about = {"what": "round", "kind": kind, "kills": kills, "faults": 0}
    return [about | {"recovery_s": time_s, "ready_s": time_s / 2} for time_s in times_s]


@pytest.mark.parametrize("count", [1, 10, 300])
@pytest.mark.parametrize("front_end", ["ublk", "fuse"])
def test_half_of_the_kills_are_at_random_times(
    front_end: FrontEndName, count: int
) -> None:
    awkward = awkward_kinds(front_end, supervisor=True)
    kinds = plan(count, awkward)
    assert len(kinds) == count
    assert kinds.count(RANDOM) == (count + 1) // 2
    if count == 300:
        assert set(kinds) == {RANDOM, *awkward}
        counts = [kinds.count(kind) for kind in awkward]
        assert max(counts) - min(counts) <= 1


def test_every_kind_is_used() -> None:
    with_supervisor = awkward_kinds("ublk", supervisor=True)
    assert {RANDOM, *with_supervisor} == set(KINDS)
    by_hand = awkward_kinds("fuse", supervisor=False)
    assert set(with_supervisor) - set(by_hand) == {ADOPTED, BOTH}


def test_the_tables_have_a_row_for_each_kind() -> None:
    killed, readers, writers = tables(
        document(
            *rounds(RANDOM, *(number / 100 for number in range(1, 101))),
            *rounds(TWICE, 0.3, kills=2),
            READER,
            WRITER,
        )
    )
    assert killed.rows == [
        ("random", "100", "100", "250.0", "500.0", "990.0", "1,000.0"),
        ("twice", "1", "2", "150.0", "300.0", "300.0", "300.0"),
        ("all", "101", "102", "250.0", "500.0", "990.0", "1,000.0"),
    ]
    assert "101 rounds" in killed.note and "one in 33" in killed.note
    assert KINDS[STOPPED] not in killed.note
    (row,) = readers.rows
    assert row[:6] == ("direct", "1,000", "5.0", "0", "0", "0")
    assert row[6:] == ("1.0", "2.5", "80.0", "70.0")
    assert writers.rows == [("12", "0", "250.0")]


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (READER | {"wrong_bytes": 3}, "direct: 3 wrong bytes"),
        (READER | {"errors": 1}, "direct: 1 errors"),
        (READER | {"hung": 2}, "direct: 2 hung"),
        (WRITER | {"errors": ["no space"]}, "writer: no space"),
        ({"what": "hang", "reason": "no read", "state": "x"}, "hung: no read"),
    ],
)
def test_whatever_was_seen_is_a_fault(result: dict[str, Any], told: str) -> None:
    good = document(*rounds(RANDOM, 0.1, 0.2, 0.3), READER, WRITER)
    assert faults(good) == []
    bad = document(*rounds(RANDOM, 0.1, 0.2, 0.3), READER, WRITER, result)
    assert faults(bad) == [told]
    assert "Nobody" in tables(good)[0].note and "Nobody" not in tables(bad)[0].note


def test_files_are_written_all_the_time(tmp_path: Path) -> None:
    with WrittenFiles(tmp_path, seed=1, deadline_s=120) as files:
        while files.report()["files"] < 3:
            files.check()
    report = files.report()
    assert report["errors"] == [] and report["max_s"] > 0
    assert len(list(tmp_path.iterdir())) == report["files"]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with WrittenFiles(tmp_path / "missing", seed=1, deadline_s=10) as files:
        while not files.report()["errors"]:
            files.check()
    assert "No such file" in files.report()["errors"][0]
