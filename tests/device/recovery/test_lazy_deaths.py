"""Servers of lazy segments that are killed or replaced while they fetch."""

from pathlib import Path

import pytest
from support.devices import is_lossless, kill_server, reading
from support.needs import may_be_killed
from support.shells import UNIT, VirtualData

from btrfs_ublk.device import (
    DeviceOptions,
    show_device,
    supervised_device,
    upgrade_device,
)
from btrfs_ublk.server import Description, FrontEndName, LazySegment, PatternSegment
from btrfs_ublk.units import MIB

pytestmark = [
    pytest.mark.data,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("no_devices"),
]

SIZE = 64 * MIB
KILLS = 5


@pytest.mark.parametrize("cached", [False, True])
def test_nothing_is_lost(
    front_end: FrontEndName, sanitized_build: Path, sparse_path: Path, cached: bool
) -> None:
    may_be_killed(front_end)
    virtual = VirtualData(sanitized_build, sparse_path, SIZE)
    held = PatternSegment(offset=0, length=SIZE)
    data = held.content(0, SIZE)
    (sparse_path / "file").write_bytes(data)
    source = {"kind": "file", "path": str(sparse_path / "file")}
    virtual.add({"size": SIZE, "unit": UNIT} | source, data, 0)
    segment = LazySegment(
        offset=0,
        length=SIZE,
        map=str(virtual.map),
        cache=str(sparse_path / "cache") if cached else None,
    )
    with supervised_device(
        Description(SIZE, [segment]), DeviceOptions(front_end=front_end), name="one"
    ) as device:
        assert device.path is not None
        with reading(device.path, held, threads=4) as readers:
            for _ in range(KILLS):
                kill_server("one")
                readers.wait_for_reads(50)
            upgrade_device("one")
            readers.wait_for_reads(50)
        assert readers.wrong == 0
        if is_lossless(show_device("one")):
            assert readers.errors == []
