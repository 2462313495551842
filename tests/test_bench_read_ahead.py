"""What the benchmark of read-ahead measures, and its table."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from conftest import Need

from btrfs_ublk.base.capabilities import BTRFS, LOOP
from btrfs_ublk.bench.read_ahead import measure_faults, measure_sequential, tables
from btrfs_ublk.bench.report import Result
from btrfs_ublk.server import FrontEndName, MemsetSegment
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume.temporary import volume

SIZE = 512 * MIB


def result(size: int, faults_per_s: float) -> Result:
    return {
        "read_ahead_bytes": size,
        "faults_per_s": faults_per_s,
        "bytes_per_fault": size,
        "bytes_per_s": 100.0 * MIB,
        "fetched_per_byte": 1.0,
        "load": 0.5,
    }


def test_a_row_for_each_size_with_the_median_of_its_turns() -> None:
    results = [result(4 * MIB, rate) for rate in (10, 30, 20)]
    results.append(result(32 * KIB, 5000))
    (table,) = tables({"results": results})
    assert [row[:5] for row in table.rows] == [
        ("4 MiB", "3", "20", "4,096.0", "100"),
        ("32 KiB", "1", "5,000", "32.0", "100"),
    ]


@pytest.mark.parametrize("size", [64 * KIB])
def test_no_fault_finds_what_another_one_fetched(
    front_end: FrontEndName, sparse_path: Path, need: Need, size: int
) -> None:
    need(BTRFS, LOOP)
    target = sparse_path / "mnt"
    target.mkdir()
    with volume(
        target,
        [MemsetSegment(offset=0, length=SIZE, byte=97)],
        virtual_data_size=SIZE,
        parent=sparse_path,
        front_end=front_end,
        read_ahead_bytes=size,
    ) as made:
        path = made.clone("clone", offset=0, size_bytes=SIZE)
        faults = measure_faults(made, path, count=70, chances=random.Random(1))
        assert faults["bytes_per_fault"] == size and faults["faults_per_s"] > 0
        assert measure_sequential(made, path)["fetched_per_byte"] == 1
