"""A cache on a disk that is full, and one of a terabyte."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shells import cache_shell

from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.content import Addition
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.server import BlockServer, Description, LazySegment
from btrfs_ublk.units import KIB, MIB, TIB

pytestmark = pytest.mark.fuse

NO_ROOM = f"error {errno.ENOSPC}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Four MiB, of which the cache's state takes one."""
    target = tmp_path / "disk"
    target.mkdir()
    with mounted("tmpfs", target, fs_type="tmpfs", options=["size=4m", "mode=700"]):
        yield target


def test_full_disk(sanitized_build: Path, small_disk: Path) -> None:
    """Units are cached or not; what is read is right, and nothing dies of it."""
    units = 100
    with cache_shell(sanitized_build, small_disk / "cache") as shell:
        assert shell.open(0, units * 64 * KIB, 64 * KIB) == "ok"
        for unit in range(units):
            assert shell.ask("put 0", unit) in ("ok", NO_ROOM)
        assert shell.ask("sync") == "ok"
        letters = shell.ask("check 0")
        assert set(letters) == {"o", "m"} and letters.count("o") >= 16
    with cache_shell(sanitized_build, small_disk / "cache") as shell:
        assert shell.open(0, units * 64 * KIB, 64 * KIB) == "ok"
        assert set(shell.ask("check 0")) == {"o", "m"}


def test_disk_filled_by_somebody_else(sanitized_build: Path, small_disk: Path) -> None:
    with cache_shell(sanitized_build, small_disk / "cache") as shell:
        assert shell.open(0, 16 * 64 * KIB, 64 * KIB) == "ok"
        assert shell.ask("put 0 0") == "ok"
        assert shell.ask("sync") == "ok"
        hog = os.open(small_disk / "hog", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            with pytest.raises(OSError):
                while True:
                    os.write(hog, bytes(4096))
            for unit in range(1, 16):
                assert shell.ask("put 0", unit) in ("ok", NO_ROOM)
            # A new content needs files; without them it is not cached.
            assert shell.open(1, 100 * MIB, 4 * KIB).startswith(("ok", "error"))
            assert set(shell.ask("check 0")) <= {"o", "m"}
        finally:
            os.close(hog)
        (small_disk / "hog").unlink()
        for unit in range(16):
            answer = shell.ask("put 0", unit)
            assert answer in ("ok", NO_ROOM)
        assert shell.open(2, MIB, 64 * KIB) == "ok"
    left = {path.name for path in (small_disk / "cache").iterdir()}
    assert not any(name.endswith(".new") for name in left)


@pytest.mark.parametrize(
    "unit_bytes", [pytest.param(256 * KIB, marks=pytest.mark.thorough), 4 * KIB]
)
def test_a_terabyte_in_little_memory(sparse_path: Path, unit_bytes: int) -> None:
    size = TIB
    source = sparse_path / "source"
    source.touch()
    os.truncate(source, size)
    described = {"kind": "file", "path": str(source), "size": size, "unit": unit_bytes}
    segment = LazySegment(
        offset=0,
        length=size,
        map=str(sparse_path / "map"),
        cache=str(sparse_path / "cache"),
    )
    with BlockServer(Description(size, [segment]), front_end="fuse") as server:
        server.map_add([described], [Addition(offset=0, length=size)])
        step = size // 200
        for _ in range(2):  # fetched, and cached
            for number in range(200):
                offset = number * step // 4096 * 4096
                assert read_direct(server.device, offset, 4096) == bytes(4096)
        status = Path(f"/proc/{server.pid}/status").read_text()
        (rss,) = [x for x in status.splitlines() if x.startswith("VmRSS")]
        print(unit_bytes, rss)
        assert int(rss.split()[1]) < 64 * 1024
    (data,) = (sparse_path / "cache").glob("*.data")
    assert data.stat().st_size > size
