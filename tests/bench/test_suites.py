"""Suites: what they name, and real ones, as small as can be."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS, LOOP, MKFS_BTRFS, ROOT, Fio
from btrfs_ublk.bench.commands.compare import command
from btrfs_ublk.bench.compare import tables
from btrfs_ublk.bench.reading import check_workload, find_peers
from btrfs_ublk.bench.report import FAILED, OK
from btrfs_ublk.bench.suite import find_suite, suite_names


@pytest.mark.parametrize("name", suite_names())
def test_suites_name_what_there_is(need: Need, name: str) -> None:
    need(Fio("psync"))
    suite = find_suite(name)
    assert suite.description
    comparisons = suite.comparisons()
    for comparison in comparisons:
        assert comparison.workloads
        find_peers(comparison.peers)
        for workload in comparison.workloads:
            check_workload(workload)
        for bar in comparison.bars:
            assert bar.peer in comparison.peers[1:]
            assert bar.workload in comparison.workloads
            assert bar.of in {"iops", "per_core"}
    titles = [comparison.title for comparison in comparisons]
    assert len(set(titles)) == len(titles)


@pytest.mark.device
class TestSmall:
    """Each runs, and all its figures are there."""

    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(ROOT, LOOP, BTRFS, MKFS_BTRFS)

    def run(self, where: Path, suite: str) -> dict[str, Any]:
        words = [f"--suite={suite}", "--size=16M", "--runtime=0.5", "--turns=1"]
        done = CliRunner().invoke(command, [*words, "--json", "--parent", str(where)])
        assert done.exit_code == 0, (done.output, done.exception)
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

    def test_by_fio(self, sparse_path: Path) -> None:
        assert {"tmpfs"} < self.measured(self.run(sparse_path, "randread"))
