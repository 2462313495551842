"""Volumes brought up and down many times: growth is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from device_cycles import command, growth
from support.needs import Need

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.bench.report import tables_of
from btrfs_ublk.units import MIB


def test_growth_is_named_and_what_breathes_is_none() -> None:
    before = {"slab_bytes": 0, "daemon_files": 5}
    after = before | {"slab_bytes": 2 * MIB}
    assert growth(before, after, cycles=1) == growth(after, before, cycles=1) == {}
    grown = growth(before, {"slab_bytes": 4 * MIB, "daemon_files": 6}, cycles=10)
    assert grown.keys() == before.keys()
    assert "4,194,304 in 10 cycles" in grown["slab_bytes"]
    after = before | {"slab_bytes": 10_000 * 512}  # an object of each cycle
    assert growth(before, after, cycles=10_000).keys() == {"slab_bytes"}


@pytest.mark.device
@pytest.mark.fuse
@pytest.mark.timing  # counts what the whole machine has
def test_volumes_up_and_down(need: Need, sparse_path: Path) -> None:
    need(FUSE, LOOP)
    output = sparse_path / "results.json"
    done = CliRunner().invoke(
        command,
        [
            *("--front-end", "fuse", "--volumes", "2", "--cycles", "20"),
            *("--stretch", "8", "--parent", str(sparse_path), "-o", str(output)),
        ],
    )
    document = json.loads(output.read_text())
    found = [each["cycles"] for each in document["results"]]
    assert found == [8, 16, 20], (done.output, done.exception)
    assert len(tables_of(document)[0].rows) == 3
    # The kernel's memory may grow for other reasons.
    grown = {name for each in document["results"] for name in each["growth"]}
    assert grown <= {"slab_bytes"} and (grown or done.exit_code == 0), done.output
