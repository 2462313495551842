"""Disks of maps and of caches that take no more: what reads get, and what is said."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import fill
from support.shells import BLOCK, UNIT, CacheShell, VirtualData

from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.waiting import wait_until
from btrfs_ublk.server import BlockServer, Description, LazySegment
from btrfs_ublk.units import KIB

pytestmark = [pytest.mark.data, pytest.mark.fuse]

SIZE = 64 * UNIT
#: Far longer than anything here takes that does not wait for it.
DEADLINE_S = 60.0


def disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    options = [f"size={size}", "mode=700"]
    with mounted("tmpfs", path, fs_type="tmpfs", options=options):
        yield path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from disk(tmp_path / "disk", "8m")


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    yield from disk(tmp_path / "other", "8m")


def problems(server: BlockServer) -> list[str]:
    return server.stats().lazy[0].disk_problems()


def describe(virtual: VirtualData, cache: Path | None = None) -> Description:
    segment = LazySegment(
        offset=0,
        length=SIZE,
        map=str(virtual.map),
        cache=str(cache) if cache else None,
        deadline_s=DEADLINE_S,
    )
    return Description(SIZE, [segment])


def first_failure(device: Path) -> int:
    """The first unit that cannot be read: the map's log may have room for some."""
    for unit in range(32):
        try:
            read_direct(device, unit * UNIT, BLOCK)
        except OSError as error:
            assert error.errno == errno.EIO
            return unit
    raise AssertionError("all of it can be read")


def test_the_disk_of_the_map_is_full(
    sanitized_build: Path, sanitized_helpers: None, small_disk: Path
) -> None:
    virtual = VirtualData(sanitized_build, small_disk, SIZE)
    virtual.add_file("plain", 0, 32 * UNIT)
    virtual.add_file("digests", 32 * UNIT, 16 * UNIT, digests=True)
    with BlockServer(describe(virtual), front_end="fuse") as server:
        assert problems(server) == []
        hog = fill(small_disk)
        unit = first_failure(server.device)
        # Asking again would not make room, so it is not done until the deadline.
        (lazy,) = server.stats().lazy
        assert lazy.fetcher.deadlines_missed == 0
        (said,) = problems(server)
        assert f"disk full: make room in {small_disk};" in said
        # Nothing has to be kept of what has digests.
        for at in range(32 * UNIT, 48 * UNIT, UNIT):
            assert read_direct(server.device, at, UNIT) == virtual.content(at, UNIT)
        fetcher = server.stats().lazy[0].fetcher
        assert fetcher.deadlines_missed == 0 and fetcher.failures["local"] >= 1
        hog.unlink()
        at = unit * UNIT
        assert read_direct(server.device, at, UNIT) == virtual.content(at, UNIT)
        assert problems(server) == []


def test_the_disk_of_the_cache_is_full(
    sanitized_build: Path, sanitized_helpers: None, small_disk: Path, other_disk: Path
) -> None:
    """All is served, uncached."""
    virtual = VirtualData(sanitized_build, other_disk, SIZE)
    virtual.add_file("plain", 0, 16 * UNIT)
    virtual.add_file("digests", 32 * UNIT, 16 * UNIT, digests=True)
    cache = small_disk / "cache"
    with BlockServer(describe(virtual, cache), front_end="fuse") as server:
        fill(small_disk)
        for first in (0, 32 * UNIT):
            for at in range(first, first + 16 * UNIT, UNIT):
                assert read_direct(server.device, at, UNIT) == virtual.content(at, UNIT)
        # The cache is written after the answer.
        (said,) = wait_until(
            lambda: problems(server), timeout_s=DEADLINE_S, what="a full disk"
        )
        assert f"disk full: make room in {cache};" in said and "not cached" in said
        fetcher = server.stats().lazy[0].fetcher
        assert fetcher.read_errors == 0


NO_ROOM = f"error {errno.ENOSPC}"


def test_the_cache_itself_on_a_full_disk(
    sanitized_build: Path, small_disk: Path
) -> None:
    """Units are cached or not; what is read is right, and nothing dies of it."""
    units = 200
    with CacheShell(sanitized_build, small_disk / "cache") as shell:
        assert shell.open(0, units * 64 * KIB, 64 * KIB) == "ok"
        for unit in range(units):
            assert shell.line("put 0", unit) in ("ok", NO_ROOM)
        assert shell.line("sync") == "ok"
        letters = shell.line("check 0")
        assert set(letters) == {"o", "m"} and letters.count("o") >= 16
    with CacheShell(sanitized_build, small_disk / "cache") as shell:
        assert shell.open(0, units * 64 * KIB, 64 * KIB) == "ok"
        assert set(shell.line("check 0")) == {"o", "m"}
