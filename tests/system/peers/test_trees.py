"""Directories of real servers, and prefixes of stores, as trees of a volume."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from support.needs import Need
from support.peer import Peer, Store, Web
from support.s3_server import BUCKET
from support.volumes import NAME, Place
from system.peers.peers import PEERS

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume import VolumeTree, up_volume

pytestmark = pytest.mark.device

BIG = random.Random(12).randbytes(MIB + 77)
FILES = {
    "big": BIG,
    "empty": b"",
    "deep/er/small": b"small\n",
    "a b#?%+&=;'(ü)": b"odd\n",
    ".hidden": b"dot\n",
}
#: In whole seconds.
MTIME_S = 1_700_000_000

nginx = PEERS["nginx"]
#: Servers, and what they do otherwise: they list no file that begins with a dot, or
#: say no times.
SERVERS: dict[str, tuple[Peer, str]] = {
    "apache2": (PEERS["apache2"], ""),
    "caddy": (PEERS["caddy"], ""),
    "lighttpd": (PEERS["lighttpd"], "no dots, no times"),
    "nginx": (nginx, "no dots"),
    "nginx-json": (
        replace(
            nginx,
            configuration=nginx.configuration.replace(
                "autoindex on;", "autoindex on; autoindex_format json;"
            ),
        ),
        "no dots",
    ),
    "python": (PEERS["python"], ""),
    "rclone": (PEERS["rclone"], ""),
    "rclone_s3": (PEERS["rclone_s3"], ""),
    "s3rver": (PEERS["s3rver"], ""),
    "seaweedfs": (PEERS["seaweedfs"], ""),
}
GATE = ("apache2", "nginx", "nginx-json", "python", "rclone")


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    need(ROOT, BTRFS, LOOP, FUSE)
    monkeypatch.setenv(CONFIG_VARIABLE, str(sparse_path / "etc"))
    found = Place(sparse_path, "fuse")
    yield found
    found.take_all_down()


def put(peer: Peer, path: str, data: bytes) -> None:
    if isinstance(peer, Store):
        peer._server.put(BUCKET, quote(f"tree/{path}"), data)
        return
    file = peer.files / "tree" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    os.utime(file, (MTIME_S, MTIME_S))


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in GATE else pytest.mark.thorough) for x in SERVERS],
)
def test_a_tree_has_what_is_listed(name: str, place: Place) -> None:
    peer, otherwise = SERVERS[name]
    if reason := peer.install():
        pytest.skip(reason)
    (place.root / "peer").mkdir()
    try:
        peer.start(place.root / "peer")
        for path, data in FILES.items():
            put(peer, path, data)
        is_web = isinstance(peer, Web)
        if is_web:
            (peer.files / "tree/hollow").mkdir()
            source = {"kind": "http", "url": f"{peer.url}/tree/", "unit": 64 * KIB}
        else:
            source = {**peer.absent(), "key": "tree/", "unit": 64 * KIB}
        definition = place.definition(trees=(VolumeTree("some/where", source),))
        up_volume(NAME, definition, base=place.base)
        top = place.target / "some/where"
        found = {str(x.relative_to(top)): x for x in top.rglob("*") if x.is_file()}
        expected = FILES.keys() - ({".hidden"} if "no dots" in otherwise else set())
        assert found.keys() == expected
        for path, file in found.items():
            assert file.read_bytes() == FILES[path], path
            if is_web and "no times" not in otherwise:
                assert file.stat().st_mtime == MTIME_S, path
        assert (top / "hollow").is_dir() == is_web
    finally:
        peer.stop()
