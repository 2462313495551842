"""Studies that measure what this machine can do: all of their rows, once."""

import json
import sys
from pathlib import Path

import pytest

from btrfs_ublk.base.capabilities import Capability
from btrfs_ublk.base.process import run
from btrfs_ublk.bench import containers, sandboxes
from btrfs_ublk.bench.report import Document


def measured(
    name: str, *words: str | Path, needs: tuple[Capability, ...] = ()
) -> Document:
    for capability in needs:
        if capability.probe():
            pytest.skip(f"{capability.name}: {capability.probe()}")
    argv = [sys.executable, "-m", f"btrfs_ublk.bench.{name}", "--json", *words]
    document: Document = json.loads(run(argv, timeout_s=240).stdout)
    return document


@pytest.mark.device
def test_sandboxes(sparse_path: Path) -> None:
    words = ("--forks=3", "--files=20", "--repeats=1", f"--directory={sparse_path}")
    document = measured("sandboxes", *words, needs=(sandboxes.EROFS,))
    (table,) = sandboxes.tables(document)
    assert [row[0] for row in table.rows] == list(sandboxes.SUBJECTS)
    lists = [row[table.columns.index("list")] for row in table.rows]
    assert [x == "-" for x in lists] == [False, False, True, True, True]


@pytest.mark.device
def test_containers(sparse_path: Path) -> None:
    pytest.importorskip("grpc")
    words = ("--repeats=2", f"--directory={sparse_path}")
    document = measured("containers", *words, needs=(containers.CONTAINERD,))
    (table,) = containers.tables(document)
    pairs = [tuple(row[:2]) for row in table.rows]
    assert len(pairs) == 2 * (len(containers.CALLS) + 1) == len(set(pairs))
    assert {row[2] for row in table.rows} == {"2"}
