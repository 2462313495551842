"""The disk that the campaign of power cuts records, and what is gone for good once a
command says so."""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.disks import (
    RECORD,
    SYNC,
    WRITE,
    FileSystem,
    Replay,
    mounted_disk,
    recording,
)
from support.images import ordinary_image

from btrfs_ublk.base.private_dirs import VOLUMES_VARIABLE
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.units import GIB, MIB, TIB
from btrfs_ublk.volume import VolumeDefinition, down_volume, remove_volume, up_volume
from btrfs_ublk.volume.store import volume_directories

pytestmark = pytest.mark.data

BLOCK = 4096
DATA = "application/octet-stream"
native = pytest.mark.device


class Cut:
    """A disk at ``disk``, and what is left of it when its power goes."""

    def __init__(self, top: Path, kind: FileSystem) -> None:
        self._top, self._kind = top, kind
        self.disk = top / "disk"
        self._position = 0

    def now(self) -> None:
        self._position = (self._top / "log").stat().st_size

    @contextmanager
    def state(self) -> Iterator[Path]:
        """Mount what the disk has when all is lost that no flush has followed."""
        top = self._top
        replay = Replay(top / "initial", top / "log", top / "work")
        replay.advance(replay.count(self._position))
        replay.lay_out(self._top / "state", "none", random.Random(1))
        with mounted_disk(self._top / "state", self.disk, self._kind) as mount:
            yield mount


@native
@pytest.mark.parametrize("kind", ["btrfs", "ext4"])
def test_a_removed_volume_stays_removed(
    sparse_path: Path, kind: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Cut(sparse_path, kind)
    monkeypatch.setenv(VOLUMES_VARIABLE, str(cut.disk / "volumes"))
    definition = VolumeDefinition(
        size_bytes=TIB, writable_bytes=256 * MIB, mount=sparse_path / "mnt"
    )
    with recording(sparse_path, kind, size_bytes=2 * GIB):
        up_volume("it", definition)
        down_volume("it")
        os.sync()
        remove_volume("it")
        cut.now()
    with cut.state():
        assert not list(volume_directories())


@native
@pytest.mark.parametrize("kind", ["btrfs", "ext4"])
def test_an_image_that_has_a_name_is_whole(sparse_path: Path, kind: FileSystem) -> None:
    """Also the one before, whose index was replaced."""
    cut = Cut(sparse_path, kind)
    data = random.Random(1).randbytes(MIB)
    with recording(sparse_path, kind, size_bytes=GIB) as mount:
        for tag in ("1", "2"):
            layout = Layout.made(mount / "deep/layout")
            with layout.adding(DATA) as (file, made):
                file.write(data + tag.encode())
            ordinary_image(layout, {"file": tag.encode()})
            layout.tag(made[0], tag)
        cut.now()
    with cut.state() as mount:
        layout = Layout.opened(mount / "deep/layout")
        for tag in ("1", "2"):
            assert layout.verify(layout.find(tag)).stat().st_size == MIB + 1
        blobs = list((layout.path / "blobs/sha256").iterdir())
        assert len(blobs) == 8
        for blob in blobs:
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name


def test_what_a_disk_may_hold(tmp_path: Path) -> None:
    """Writes before the last flush are whole; others in any blocks, each in order."""
    initial, log, state = (tmp_path / name for name in ("initial", "log", "state"))
    initial.write_bytes(bytes(8 * BLOCK))

    def record(kind: int, offset: int = 0, data: bytes = b"") -> bytes:
        return RECORD.pack(kind, 0, 1, offset, 0, len(data)) + data

    log.write_bytes(
        record(WRITE, 0, b"a" * 2 * BLOCK)
        + record(SYNC)
        + record(WRITE, BLOCK, b"b" * 3 * BLOCK)
        + record(WRITE, BLOCK, b"c" * 2 * BLOCK)
        + record(WRITE, 0, b"cut off")[:-1]
    )
    replay = Replay(initial, log, tmp_path / "work")
    assert len(replay.records) == 4 and replay.under_way() == [0, 1, 0, 1, 2]
    assert replay.count(replay.records[2].end) == 3
    replay.advance(4)
    source, seen = random.Random(1), set()
    for mode in ("none", "all", *["some"] * 300):
        replay.lay_out(state, mode, source)
        content = state.read_bytes()
        blocks = [content[at : at + BLOCK] for at in range(0, 8 * BLOCK, BLOCK)]
        assert all(block == block[:1] * BLOCK for block in blocks)
        letters = b"".join(block[:1] for block in blocks).replace(b"\0", b".").decode()
        expected = {"none": ["aa......"], "all": ["accb...."]}
        assert letters in expected.get(mode, [letters])
        seen.add(letters)
    first = {letters[0] for letters in seen}
    assert first == {"a"} and {letters[1] for letters in seen} == set("abc")
    # The third block may have the second write without the first, and both or none.
    assert {letters[2:4] for letters in seen} == {a + b for a in ".bc" for b in ".b"}


def test_sectors_are_torn_but_not_superblocks(tmp_path: Path) -> None:
    (tmp_path / "initial").write_bytes(bytes(2 * BLOCK))
    superblock = bytes(64) + b"_BHRfS_M" + bytes([1]) * (BLOCK - 72)
    written = superblock + bytes([2]) * BLOCK
    head = RECORD.pack(WRITE, 0, 1, 0, 0, len(written))
    (tmp_path / "log").write_bytes(head + written)
    replay = Replay(
        *(tmp_path / name for name in ("initial", "log", "work")), sector_bytes=512
    )
    replay.advance(1)
    source, torn = random.Random(1), set()
    for _ in range(100):
        replay.lay_out(tmp_path / "state", "some", source)
        content = (tmp_path / "state").read_bytes()
        assert content[:BLOCK] in (bytes(BLOCK), superblock)
        sectors = [content[at : at + 512] for at in range(BLOCK, 2 * BLOCK, 512)]
        assert all(sector in (bytes(512), bytes([2]) * 512) for sector in sectors)
        torn.add(sum(sector[0] == 2 for sector in sectors))
    assert {0, 3, 4, 5, 8} <= torn
