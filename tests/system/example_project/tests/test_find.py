"""Numbers are found, and no more is fetched than what that takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sorted_records.find import find

from btrfs_ublk.server import PatternSegment
from btrfs_ublk.testing.range_server_fixtures import RangeServer
from btrfs_ublk.testing.volume_fixtures import VolumeFactory


def test_little_is_fetched(dataset: Path, server: RangeServer) -> None:
    before = len(server.served())
    assert find(dataset, 0) == 0
    fetched_bytes = sum(request.length for request in server.served()[before:])
    assert 0 < fetched_bytes < dataset.stat().st_size


@pytest.mark.parametrize(
    ("number", "index"), [(2, 1), (3, None), (2097150, 1048575), (2097152, None)]
)
def test_numbers_are_found(dataset: Path, number: int, index: int | None) -> None:
    assert find(dataset, number) == index


def test_the_command(dataset: Path) -> None:
    program = Path(sys.executable).with_name("sorted-records")
    result = subprocess.run([program, dataset, "4242"], capture_output=True, text=True)
    assert result.stdout == "2121\n"


def test_a_dataset_can_be_changed(dataset: Path) -> None:
    """Here; what the server has stays as it is."""
    with dataset.open("r+b") as file:
        file.write((1).to_bytes(8, "little"))
    assert find(dataset, 0) is None
    assert find(dataset, 1) == 0


def test_a_terabyte(btrfs_ublk_volume_factory: VolumeFactory) -> None:
    """No server has that: each 8 bytes of a pattern are their own offset."""
    size = 1 << 40
    volume = btrfs_ublk_volume_factory([PatternSegment(offset=0, length=size)])
    path = volume.clone("terabyte", offset=0, size_bytes=size)
    assert find(path, size - 8) == size // 8 - 1
    assert find(path, 12345) is None
