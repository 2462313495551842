"""A dataset that is elsewhere: in a volume, fetched when it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from btrfs_ublk.testing.range_server_fixtures import RangeServer
from btrfs_ublk.testing.volume_fixtures import VolumeFactory

RECORDS = 1 << 20


@pytest.fixture(scope="session")
def server(btrfs_ublk_range_server_session: RangeServer) -> RangeServer:
    """Serves the even numbers, 8 MiB of them."""
    numbers = range(0, 2 * RECORDS, 2)
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    btrfs_ublk_range_server_session.put("even", data)
    return btrfs_ublk_range_server_session


@pytest.fixture(scope="module")
def dataset(
    btrfs_ublk_volume_factory_module: VolumeFactory, server: RangeServer
) -> Path:
    """In a new volume for each module: with nothing in its cache."""
    volume = btrfs_ublk_volume_factory_module(files={"even": server.url("even")})
    return volume.target / "even"
