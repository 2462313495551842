"""Background completion: what a map names comes into the cache by itself."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import kill_server
from support.needs import Need
from support.volumes import NAME, Place
from support.waiting import wait_until
from support.web_servers import (
    NGINX,
    Origin,
    ScriptedServer,
    scripted_server,
    web_server,
)

from btrfs_ublk.base.capabilities import FUSE
from btrfs_ublk.content.completion import Completion
from btrfs_ublk.device import device_map, show_device
from btrfs_ublk.ops.monitor.metrics import metrics_text
from btrfs_ublk.server import ServerStats
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import VolumeFile, down_volume, show_volume, up_volume


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.fixture
def web(origin: Origin) -> Iterator[ScriptedServer]:
    with scripted_server(origin) as server:
        yield server
        origin.go_on.set()


def told() -> Completion | None:
    stats = show_device(NAME).stats
    return ServerStats.parse(stats).lazy[0].complete if stats else None


@pytest.mark.fuse
def test_a_volume_needs_no_server_in_the_end(need: Need, sparse_path: Path) -> None:
    """Also when its own server dies before all is there."""
    need(FUSE, NGINX)
    place = Place(sparse_path, "fuse")
    names = ("one", "two")
    try:
        with web_server(sparse_path / "web") as web:
            for name in names:
                shutil.copy(place.content(name), web.files / name)
            urls = {name: web.url(f"files/{name}") for name in names}
            files = [VolumeFile.parse(f"dir/{name}={urls[name]}") for name in names]
            definition = place.definition(files=tuple(files), complete=4 * MIB)
            up_volume(NAME, definition, base=place.base)
            wait_until(lambda: (found := told()) and found.done_units)
            kill_server(NAME)
            wait_until(lambda: (found := told()) and found.is_done)
            about = show_volume(NAME, base=place.base).complete
            assert about is not None and about.startswith("done; "), about
            assert f'btrfs_ublk_complete_done{{device="{NAME}"' in metrics_text()
            found = device_map(NAME).stats()["complete"]
            assert found["units"] == found["done_units"] > 0
            down_volume(NAME, base=place.base)
        done = place.command("up", NAME, "--complete=idle")
        assert done.returncode == 0, done.stderr
        assert all(place.matches(name) for name in names)
    finally:
        place.take_all_down()
