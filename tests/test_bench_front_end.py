"""The table of the front ends' benchmark."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from btrfs_ublk.bench import front_end
from btrfs_ublk.bench.front_end import _HOG, BASELINES, hogs, ratios, tables
from btrfs_ublk.bench.report import Result


def result(subject: str, turn: int, iops: float) -> Result:
    numbers = {"iops": iops, "p99_us": 50.0, "cpu_us": 20.0, "load": 0.5}
    return {"workload": "psync", "subject": subject, "turn": turn} | numbers


def test_ratios_are_those_of_the_same_turn() -> None:
    """A turn in which all was slow says as much as one in which nothing was."""
    baseline = [result("b", 1, 100.0), result("b", 2, 10.0)]
    measured = [result("m", 1, 50.0), result("m", 2, 5.0), result("m", 3, 99.0)]
    assert ratios(measured, baseline) == [0.5, 0.5]


def test_hogs_are_there_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def policies() -> list[int]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == [*_HOG, MARK]:
                found.append(os.sched_getscheduler(process.pid))
        return found

    MARK = f"hog-{os.getpid()}"
    monkeypatch.setattr(front_end, "_HOG", (*_HOG, MARK))
    monkeypatch.setattr(front_end.os, "sched_getaffinity", lambda _: {0, 1})
    for kind, policy in (("idle", os.SCHED_IDLE), ("normal", os.SCHED_OTHER)):
        with hogs(kind):
            deadline_s = time.monotonic() + 10
            while policies() != [policy] * 2:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
        deadline_s = time.monotonic() + 10
        while policies():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    with hogs(None):
        assert policies() == []


def test_devices_are_compared_with_devices_and_files_with_files() -> None:
    results = [
        result(BASELINES["device"], 1, 1000.0),
        result(BASELINES["file"], 1, 500.0),
        result("device: fuse", 1, 800.0),
        result("file: clone on fuse", 1, 450.0),
    ]
    (table,) = tables({"results": results})
    assert [row[0] for row in table.rows] == [one["subject"] for one in results]
    assert [row[3] for row in table.rows] == ["1.00", "1.00", "0.80", "0.90"]
    (table,) = tables({"results": results[2:]})
    assert {row[3] for row in table.rows} == {"-"}
