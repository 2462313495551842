"""Suites: what they name, how they scale, what they say, and real ones, scaled down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS, LOOP, MKFS_BTRFS, ROOT, Fio
from btrfs_ublk.bench.commands.compare import command
from btrfs_ublk.bench.compare import tables
from btrfs_ublk.bench.report import FAILED, OK
from btrfs_ublk.bench.suite import Suite, find_suite, suite_names

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
