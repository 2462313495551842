"""``btrfs-ublk volume status``: how much of each file was fetched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.volumes import NAME, Place
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.testing.range_server_fixtures import range_server
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume import (
    KeptFile,
    VolumeFile,
    down_volume,
    show_volume,
    up_volume,
)

pytestmark = pytest.mark.usefixtures("in_process")

SIZE_BYTES = MIB + 77
COUNT = 23


@pytest.fixture
def place(need: Need, sparse_path: Path) -> Iterator[Place]:
    need(ROOT, BTRFS, LOOP, FUSE)
    found = Place(sparse_path, "fuse")
    yield found
    found.take_all_down()


def test_how_much_of_each_file_is_here(place: Place) -> None:
    web = place.root / "web"
    web.mkdir()
    for number in range(COUNT):
        (web / str(number)).write_bytes(os.urandom(SIZE_BYTES))
    with range_server(web, log=place.root / "log", timeout_s=60) as server:
        files = [VolumeFile.parse(f"{x}={server.url(str(x))}") for x in range(COUNT)]
        files += [
            VolumeFile.from_keys({"path": "empty", "size": 0}),
            VolumeFile.parse('computed={"kind": "pattern", "size": 4096}'),
        ]
        definition = place.definition(files=tuple(files))
        up_volume(NAME, definition, base=place.base)
        (place.target / "0").read_bytes()
        with open(place.target / "1", "rb") as file:
            file.read(4 * KIB)

        def files_there() -> dict[str, KeptFile]:
            return {x.path: x for x in show_volume(NAME, base=place.base).files}

        # What was read comes into the cache after the answer.
        wait_until(lambda: files_there()["0"].cached_bytes == SIZE_BYTES)
        wait_until(lambda: files_there()["1"].cached_bytes)
        found = files_there()
        assert found["0"].size_bytes == SIZE_BYTES
        part = found["1"].cached_bytes
        assert part is not None and 4 * KIB <= part < SIZE_BYTES
        assert found["2"].cached_bytes == 0
        assert found["empty"].cached_bytes is found["computed"].cached_bytes is None
        for answer in (place.answer("status", NAME), place.answer("list")[0]):
            assert len(answer["files"]) == COUNT + 2
        assert place.answer("status", NAME)["files"][0]["cached_bytes"] == SIZE_BYTES
        lines = place.command("status", NAME).stdout.splitlines()
        assert sum(line.startswith("file ") for line in lines) == 20
        assert "0: 1 MiB of 1 MiB are here, from http://" in "".join(lines)
        assert lines[-1].split() == ["and", "5", "more:", "--json", "has", "all"]
        down_volume(NAME, base=place.base)
        # It is known again before anything is read.
        up_volume(NAME, definition, base=place.base)
        again = show_volume(NAME, base=place.base).files[0]
        assert again.cached_bytes == SIZE_BYTES
    down_volume(NAME, base=place.base)
    assert show_volume(NAME, base=place.base).files[0].cached_bytes is None
