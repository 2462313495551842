"""scripts/test: what its parts select, what counts, and what quarantine allows."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import PROJECT

sys.path.insert(0, str(PROJECT / "scripts/lib"))

import testrun  # noqa: E402
from testrun import Part, Runner  # noqa: E402

MARKERS = "device ublk vm timing thorough containerd2 gate_ublk".split()


def parts_of(mode: str, **given: Any) -> list[Part]:
    settings = {"lint": True, "no_vm": "", "ublk": False} | given
    parts = list(itertools.chain(*testrun.lanes(mode, **settings)))
    return parts + testrun.last_parts(
        mode, no_vm=settings["no_vm"], ublk=settings["ublk"]
    )


def selecting(parts: list[Part], marks: set[str]) -> list[str]:
    names = {name: name in marks for name in [*MARKERS, "fuse", "data"]}
    return [
        part.name
        for part in parts
        # A part of arm64 repeats some tests there, and FUSE those of kills.
        if part.select and not part.arch and part.kernel != testrun.OLDEST
        if eval(part.select, {}, names)  # as pytest's -m does
    ]


@pytest.mark.parametrize("ublk", [False, True])
def test_all_runs_each_test_once_on_each_kernel(ublk: bool) -> None:
    parts = parts_of("all", ublk=ublk)
    for count in range(len(MARKERS)):
        for marks in map(set, itertools.combinations(MARKERS, count)):
            if "ublk" in marks and marks & {"vm", "containerd2"}:
                continue  # there is none
            times = len(testrun.KERNELS) if "ublk" in marks and not ublk else 1
            if "containerd2" in marks:
                times = 0 if not marks & {"timing", "vm"} else 1
            assert len(selecting(parts, marks)) == times, marks


def test_the_gate_leaves_out_what_is_thorough_or_measures() -> None:
    for mode in ("gate", "quick"):
        for mark in ("thorough", "timing", "vm", "containerd2"):
            for others in ((), ("device",), ("ublk", "device")):
                assert not selecting(parts_of(mode), {mark, *others}), mark


def test_the_gate_has_the_rest() -> None:
    parts = parts_of("gate")
    assert selecting(parts, set()) == ["without devices"]
    assert selecting(parts, {"device"}) == ["devices"]
    assert selecting(parts, {"device", "ublk"}) == []
    assert selecting(parts, {"device", "ublk", "gate_ublk"}) == ["ublk, Linux latest"]


@pytest.fixture
def quarantine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "quarantine.txt"
    path.write_text("# none\n")
    monkeypatch.setattr(testrun, "QUARANTINE", path)
    return path


def result(name: str, outcome: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "outcome": outcome,
        "seconds": 1.0,
        "text": "",
        "data": False,
    } | more


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(testrun, "RESULTS", tmp_path)
    return tmp_path


class Replayed(Runner):
    """Runs nothing: what pytest would write is given."""

    def __init__(self, *runs: list[dict[str, Any]], status: int = 0) -> None:
        super().__init__([])
        self.runs, self.status, self.asked = list(runs), status, []

    def _bounded(self, argv: Any, limit_s: float, log: Path) -> int:
        self.asked.append(list(argv))
        lines = map(json.dumps, self.runs.pop(0))
        log.with_suffix(".jsonl").write_text("".join(f"{x}\n" for x in lines))
        log.write_text("its log")
        return self.status


PART = Part("devices", 100, "device")


def test_what_passes_when_it_runs_again_is_flaky(
    quarantine: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Replayed(
        [result("a", "passed"), result("b", "failed"), result("c", "failed")],
        [result("b", "passed"), result("c", "failed")],
        status=1,
    )
    runner.run_lanes([[PART]])
    flaky = runner.run_failed_again()
    assert flaky == ["b"] and runner.asked[1][-2:] == ["b", "c"]
    assert testrun.conclude(runner, flaky, []) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["1 flaky", "2 passed, 1 failed, 0 skipped"]
    assert "flaky: b" in said
    assert quarantine.read_text().splitlines()[-1].endswith(" b unknown")


def test_data_that_are_wrong_once_are_wrong(
    quarantine: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Replayed([result("a", "failed", data=True)], status=1)
    runner.run_lanes([[PART]])
    assert runner.run_failed_again() == [] and len(runner.asked) == 1
    assert testrun.conclude(runner, [], []) == 1
    assert capsys.readouterr().out.endswith("0 passed, 1 failed, 0 skipped\n")


@pytest.mark.parametrize("status", [1, 124, 125, 139])
def test_a_run_that_ended_badly_has_failed(
    quarantine: Path, results: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    runner = Replayed([result("a", "passed")], status=status)
    runner.run_lanes([[PART]])
    assert testrun.conclude(runner, [], []) == 1
    assert capsys.readouterr().out.endswith("1 passed, 1 failed, 0 skipped\n")


@pytest.mark.parametrize(("require", "status"), [(False, 0), (True, 1)])
def test_skips_fail_where_all_is_required(
    quarantine: Path,
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    require: bool,
    status: int,
) -> None:
    monkeypatch.setattr(testrun, "REQUIRE", require)
    for outcome, expected in (("skipped", status), ("inapplicable", 0)):
        runner = Replayed([result("a", "passed"), result("b", outcome)])
        runner.run_lanes([[PART]])
        assert testrun.conclude(runner, [], []) == expected
