"""The read path must never depend on the file system that it backs."""

import errno
from pathlib import Path
from typing import Any

from support.needs import Need
from support.shells import UNIT, VirtualData

from btrfs_ublk.base.capabilities import BTRFS, LOOP
from btrfs_ublk.base.process import run
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.server import FrontEndName, LazySegment
from btrfs_ublk.units import GIB, MIB
from btrfs_ublk.volume.temporary import Volume, volume

SIZE = 64 * MIB


def file_source(path: Path) -> dict[str, Any]:
    return {"size": UNIT, "unit": UNIT, "kind": "file", "path": str(path)}


def read_clone(made: Volume, offset: int) -> bytes | int:
    clone = made.clone(f"at-{offset}", offset=offset, size_bytes=UNIT)
    try:
        return read_direct(clone, 0, UNIT)
    except OSError as error:
        assert error.errno is not None
        return error.errno


def test_sources_on_the_sprout(
    front_end: FrontEndName, need: Need, sanitized_build: Path, sparse_path: Path
) -> None:
    """They are refused, at once and whatever is between; others are served."""
    need(BTRFS, LOOP)
    virtual = VirtualData(sanitized_build, sparse_path, SIZE)
    target, below = sparse_path / "mnt", sparse_path / "below"
    target.mkdir()
    below.mkdir()
    data = b"\5" * UNIT
    virtual.add(file_source(target / "file"), data, 0)
    virtual.add(file_source(below / "file"), data, UNIT)
    virtual.add(file_source(sparse_path / "file"), data, 2 * UNIT)
    (sparse_path / "file").write_bytes(data)
    segment = LazySegment(offset=0, length=GIB, map=str(virtual.map))
    with volume(
        target,
        [segment],
        virtual_data_size=GIB,
        parent=sparse_path,
        front_end=front_end,
    ) as made:
        (target / "file").write_bytes(data)
        assert read_clone(made, 0) == errno.EIO
        assert read_clone(made, 2 * UNIT) == data
        image = target / "image"
        with image.open("wb") as file:
            file.truncate(128 * MIB)
        run(["mkfs.btrfs", "-q", "-M", image], timeout_s=60)
        with loop_device(image) as loop, mounted(loop.path, below):
            (below / "file").write_bytes(data)
            assert read_clone(made, UNIT) == errno.EIO
        fetcher = made.server.stats().lazy[0].fetcher
        assert fetcher.failures["denied"] >= 2
        assert sum(fetcher.failures.values()) == fetcher.failures["denied"]
