"""What earlier versions have written is read, and what newer ones have is refused.

The archives in fixtures/formats/ were written by the programs of the commits that their
names have. A volume is all that `volume up` and `down` have left, with a file that was
written and one of virtual data; a device is what a running one has in /run.
"""

import json
import re
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import zstandard
from support.paths import TESTS

from btrfs_ublk.containers.store import Kind, SnapshotStore
from btrfs_ublk.content.trace import Trace
from btrfs_ublk.device.state import DeviceDirectory
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image import parse_name
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.check import check_image
from btrfs_ublk.image.pack import read_header
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.server import Description
from btrfs_ublk.volume.store import volume_directory

FORMATS = TESTS / "support/formats"


def unpack(name: str, directory: Path) -> None:
    with tarfile.open(FORMATS / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="tar")  # with the modes that it has


@pytest.mark.parametrize("commit", ["46cece7", "9e50625"])
def test_a_device(tmp_path: Path, commit: str) -> None:
    """A daemon that takes over what an older one had can read what it left."""
    unpack(f"device-{commit}", tmp_path)
    device = DeviceDirectory(tmp_path / "old")
    assert device.spec().front_end == "fuse"
    assert device.state().status == "serving"
    Description.from_json(device.description.read_text())


def test_an_image(tmp_path: Path) -> None:
    unpack("image-07876ce", tmp_path)
    name = parse_name(f"oci:{tmp_path}/image:1")
    assert not check_image(name, RegistryAccess(), with_btrfs_check=False).problems


@pytest.mark.parametrize("commit", ["b1171ca", "b726efb"])
def test_snapshots(tmp_path: Path, commit: str) -> None:
    unpack(f"snapshots-{commit}", tmp_path)
    for _ in range(2):  # the first time, the file gets this version
        store = SnapshotStore(tmp_path / "snapshots.db")
        found = {each.name: (each.kind, each.parent) for each in store.find()}
        assert found == {"layer": (Kind.COMMITTED, ""), "run": (Kind.ACTIVE, "layer")}
        store.close()


def _json(path: Path, read: Callable[[], object]) -> tuple[Path, Callable[[], object]]:
    keys = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**keys, "version": 99}))
    return path, read


def _volume(top: Path) -> tuple[Path, Callable[[], object]]:
    unpack("volume-9e50625", top)
    volume = volume_directory("old", top / "volumes")
    return _json(top / "volumes/old/volume.json", volume.made)


def _device(name: str) -> Callable[[Path], tuple[Path, Callable[[], object]]]:
    def make(top: Path) -> tuple[Path, Callable[[], object]]:
        unpack("device-9e50625", top)
        device = DeviceDirectory(top / "old")
        read = device.state if name == "state.json" else device.spec
        return _json(top / "old" / name, read)

    return make


def _description(top: Path) -> tuple[Path, Callable[[], object]]:
    unpack("device-9e50625", top)
    path = top / "old/description.json"
    return _json(path, lambda: Description.from_json(path.read_text()))


def _references(top: Path) -> tuple[Path, Callable[[], object]]:
    (top / "sha256").mkdir()
    return _json(top / "references.json", lambda: ImageStore(top).images())


def _snapshots(top: Path) -> tuple[Path, Callable[[], object]]:
    unpack("snapshots-b726efb", top)
    path = top / "snapshots.db"
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version = 99")
    return path, lambda: SnapshotStore(path)


def _pack(top: Path) -> tuple[Path, Callable[[], object]]:
    path = top / "pack"
    path.write_bytes(zstandard.compress(b"BTRFSUBLKPACK9\n{}\n"))
    return path, lambda: read_header(path)


def _trace(top: Path) -> tuple[Path, Callable[[], object]]:
    path = top / "trace"
    path.write_text('{"format": "btrfs-ublk trace", "version": 99}\n')
    return path, lambda: Trace.load(path)


@pytest.mark.parametrize(
    "make",
    [
        *(_volume, _description, _references, _snapshots, _pack, _trace),
        *(_device("state.json"), _device("device.json")),
    ],
)
def test_a_newer_version(
    tmp_path: Path, make: Callable[[Path], tuple[Path, Callable[[], object]]]
) -> None:
    """Maps, caches and indexes have tests of their own, in test_store_file.py,
    test_cache.py and test_codec.py."""
    path, read = make(tmp_path)
    before = path.read_bytes()
    with pytest.raises(BtrfsUblkError) as raised:
        read()
    said = str(raised.value)
    assert re.search(r"version 9", said), said  # what was found, and what is known
    assert re.search(r"\b[123]\b", said), said
    assert re.search(r"newer|made by", raised.value.hint or ""), raised.value.hint
    assert path.read_bytes() == before
