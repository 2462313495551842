"""Suites: what they name, how they scale, what they say, and real ones, scaled down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS, LOOP, MKFS_BTRFS, ROOT, Fio
from btrfs_ublk.bench import suite as suites
from btrfs_ublk.bench.commands.compare import command
from btrfs_ublk.bench.compare import tables
from btrfs_ublk.bench.measurements.listing import TreePlan, write
from btrfs_ublk.bench.report import FAILED, OK
from btrfs_ublk.bench.suite import (
    Cost,
    Figure,
    Published,
    Quantity,
    Scaling,
    Suite,
    find_suite,
    parse_factor,
    suite_names,
)
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import GIB, MIB

LEAST = 0.001


def amounts_of(suite: Suite, factor: float) -> Mapping[str, float]:
    return suite.scaling.amounts(factor) if suite.scaling else {}


@pytest.mark.parametrize("name", suite_names())
@pytest.mark.parametrize("factor", [LEAST, 1.0])
def test_suites_name_what_there_is(need: Need, name: str, factor: float) -> None:
    need(Fio("psync"))
    suite = find_suite(name)
    assert suite.description
    comparisons = suite.comparisons_of(amounts_of(suite, factor))
    for comparison in comparisons:
        assert comparison.workloads
        comparison.contest.find(comparison.peers)
        for workload in comparison.workloads:
            comparison.contest.check(workload)
        names = {measure.name for measure in comparison.contest.measures}
        for bar in comparison.bars:
            assert bar.peer in comparison.peers[1:]
            assert bar.workload in comparison.workloads
            assert bar.of in {*names, "per_core"}
    titles = [comparison.title for comparison in comparisons]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", suite_names())
def test_published_figures_are_of_what_is_measured(name: str) -> None:
    """At full size each of theirs has a workload of ours, and a peer, if any."""
    suite = find_suite(name)
    if suite.published is None:
        return
    comparisons = suite.comparisons_of(amounts_of(suite, 1.0))
    for figure in suite.published.figures:
        (comparison,) = [x for x in comparisons if figure.workload in x.workloads]
        measures = {measure.name for measure in comparison.contest.measures}
        assert figure.measure in measures
        assert figure.like is None or figure.like in comparison.peers
    record = suite.published.to_dict()
    assert record["other_hardware"] is True and record["hardware"] and record["source"]


class TestScale:
    SCALING = Scaling(
        [
            Quantity("size_bytes", 8 * GIB, 16 * MIB, "bytes"),
            Quantity("runtime_s", 20, 0.5, "s"),
            Quantity("files", 100, 3),
        ],
        lambda amounts: Cost(2 * amounts["size_bytes"], amounts["runtime_s"] * 10),
    )

    def test_amounts(self) -> None:
        assert self.SCALING.amounts(1.0) == {
            **{"size_bytes": 8 * GIB, "runtime_s": 20, "files": 100}
        }
        small = self.SCALING.amounts(0.01)
        assert small == {"size_bytes": 81 * MIB, "runtime_s": 0.5, "files": 3}

    def test_it_says_what_it_did(self) -> None:
        assert self.SCALING.told(1.0) == "full size"
        told = self.SCALING.told(0.01)
        assert told.startswith("scaled by 0.01: size_bytes 8 GiB -> 81 MiB, runtime_s")
        assert "files 100 -> 3" in told
        record = self.SCALING.record(0.01)
        assert record["factor"] == 0.01 and record["full"]["files"] == 100

    def fit(self, monkeypatch: pytest.MonkeyPatch, free: int, turns: int) -> float:
        monkeypatch.setattr(suites, "_free_bytes", lambda _: float(free))
        return self.SCALING.factor_for(Path("/"), turns=turns)

    def test_auto_fits_memory_and_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.fit(monkeypatch, 64 * GIB, 1) == 1.0
        assert self.fit(monkeypatch, 16 * GIB, 1) == 0.5
        assert self.fit(monkeypatch, 1 * GIB, 1) == 0.02
        assert self.fit(monkeypatch, 64 * GIB, 10) == 0.5
        # Too many turns for any: as small as can be.
        assert self.fit(monkeypatch, 64 * GIB, 10_000) == LEAST

    def test_too_little_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BtrfsUblkError, match="16 MiB are free.*32 MiB are needed"):
            self.fit(monkeypatch, 16 * MIB, 1)

    def test_factors(self) -> None:
        assert parse_factor("auto") is None and parse_factor("0.25") == 0.25
        for text in ("0", "-1", "1.5", "half", "nan", "inf"):
            with pytest.raises(UsageError, match=text):
                parse_factor(text)

    def test_only_what_was_published_has_a_scale(self) -> None:
        done = invoke("--suite=server", "--scale=0.5")
        assert isinstance(done.exception, UsageError)


def published_document(ours: Mapping[str, float]) -> dict[str, Any]:
    figures = [
        Figure("w", "theirs A", "a", "seconds", 2.0),
        Figure("w", "theirs B", "b", "seconds", 3.0),
        Figure("w", "theirs C", None, "seconds", 1.0),
        Figure("w", "theirs A", "a", "seconds", 5.0, "elsewhere"),
    ]
    measure = {"name": "seconds", "unit": "s", "better": "less", "digits": 2}
    return {
        "parameters": {
            "published": Published("X, 2020", "a big machine", "N.", figures).to_dict(),
            "comparisons": [
                {
                    **{"title": "t", "peers": ["a", "b"], "workloads": ["w"]},
                    **{"bars": [], "measures": [measure]},
                }
            ],
        },
        "results": [
            {
                **{"comparison": "t", "run": "1", "peer": peer, "workload": "w"},
                **{"turn": 1, "status": OK, "seconds": seconds},
            }
            for peer, seconds in ours.items()
        ],
    }


def test_published_figures_stand_beside_ours() -> None:
    ours, theirs = tables(published_document({"a": 10.0, "b": 40.0}))
    assert "other hardware" in theirs.title and "a big machine" in theirs.note
    cells = [(row[1], row[5], row[7]) for row in theirs.rows]
    assert cells == [
        ("theirs A", "1.00", "1.00"),
        ("theirs B", "1.50", "4.00"),
        ("theirs C", "0.50", "-"),
        ("theirs A, elsewhere", "1.00", "1.00"),
    ]
    assert ours.columns[2] == "seconds" and ours.rows[1][2] == "40.00"
    _, alone = tables(published_document({"b": 40.0}))
    assert [row[7] for row in alone.rows] == ["-", "-", "-", "-"]


def test_one_plan_is_one_tree(tmp_path: Path) -> None:
    plan = TreePlan(files=60, directories=12, links=7)
    plan.make(tmp_path, write)
    plan.check(tmp_path)
    some, *_ = sorted(tmp_path.rglob("*.so"))
    some.write_bytes(some.read_bytes() + b"x")
    with pytest.raises(BtrfsUblkError, match=some.name):
        plan.check(tmp_path)
    some.unlink()
    with pytest.raises(BtrfsUblkError, match=some.name):
        plan.check(tmp_path)
    with pytest.raises(BtrfsUblkError):
        replace(plan, links=8).check(tmp_path)


def invoke(*words: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, words)))


@pytest.mark.device
class TestSmall:
    """As small as can be: each runs, and all its figures are there."""

    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(ROOT, LOOP, BTRFS, MKFS_BTRFS)

    def run(self, where: Path, *words: str) -> dict[str, Any]:
        done = invoke(*words, "--turns=1", "--json", "--parent", where)
        assert done.exit_code == 0, (done.output, done.exception)
        assert "scaled by" in done.stderr or "full size" in done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["complete"]
        assert not [x for x in document["results"] if x["status"] == FAILED]
        for comparison in document["parameters"]["comparisons"]:
            for result in document["results"]:
                if result["status"] == OK:
                    for measure in comparison["measures"]:
                        assert result[measure["name"]] > 0
        assert tables(document)
        return document

    def measured(self, document: dict[str, Any]) -> set[str]:
        return {x["peer"] for x in document["results"] if x["status"] == OK}

    def test_ls_lr(self, sparse_path: Path) -> None:
        document = self.run(sparse_path, "--suite=ls-lr", "--scale=0.002")
        assert {"btrfs", "ext4", "fuse-clones"} <= self.measured(document)

    def test_write_lazy(self, sparse_path: Path) -> None:
        """A clone takes a block, and some metadata; overlayfs the whole file."""
        document = self.run(sparse_path, "--suite=write-lazy", "--scale=0.05")
        assert {"fuse-clone", "btrfs-reflink"} <= self.measured(document)
        written = {x["peer"]: x.get("written_kib") for x in document["results"]}
        assert written["fuse-clone"] < 1024
        if written["overlay-erofs"] is not None:
            assert (
                written["overlay-erofs"] >= document["parameters"]["size_bytes"] >> 10
            )

    @pytest.mark.parametrize(
        "name",
        ["randread", pytest.param("syncwrite", marks=pytest.mark.thorough)],
    )
    def test_by_fio(self, sparse_path: Path, name: str) -> None:
        document = self.run(sparse_path, f"--suite={name}", "--scale=0.001")
        assert {"tmpfs"} < self.measured(document)
