"""Lazy segments, through engine-shell in a sanitizer build."""

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.shells import (
    BLOCK,
    UNIT,
    EngineShell,
    VirtualData,
    describe,
    punch_hole,
    refusal,
)

SIZE = 64 * UNIT  # of the virtual data


def lazy(tmp_path: Path, *, cached: bool = True, **keys: Any) -> dict[str, Any]:
    segment = {"kind": "lazy", "length": SIZE, "map": str(tmp_path / "map")}
    if cached:
        segment["cache"] = str(tmp_path / "cache")
    return segment | keys


@pytest.fixture
def virtual(sanitized_build: Path, tmp_path: Path) -> VirtualData:
    return VirtualData(sanitized_build, tmp_path, SIZE)


@pytest.fixture
def filled(virtual: VirtualData) -> VirtualData:
    virtual.fill()
    return virtual


@pytest.mark.parametrize("cached", [False, True])
def test_byte_exact(
    sanitized_build: Path, filled: VirtualData, tmp_path: Path, cached: bool
) -> None:
    description = describe(lazy(tmp_path, cached=cached))
    for seed in (3, 3):  # the second one finds what the first has cached
        with EngineShell(sanitized_build, description) as shell:
            draw = random.Random(seed)
            for _ in range(300):
                offset = draw.randrange(22 * UNIT // BLOCK) * BLOCK
                length = draw.choice([1, 1, 2, 16, 33, 100]) * BLOCK
                answer = shell.request(f"read {offset} {length}")
                assert answer == filled.content(offset, length), (offset, length)
            lazy_stats = shell.stats()["lazy"][0]["fetcher"]
    assert lazy_stats["deadlines_missed"] == 0
    if cached:
        assert lazy_stats["units_fetched"] == 0


@pytest.mark.parametrize("policy", ["error", "zero"])
def test_what_is_not_mapped(
    sanitized_build: Path, filled: VirtualData, tmp_path: Path, policy: str
) -> None:
    description = describe(lazy(tmp_path, unmapped=policy))
    with EngineShell(sanitized_build, description) as shell:
        whole = 8 * UNIT
        answer = shell.request(f"read 0 {whole}")
        if policy == "error":
            assert answer == errno.EIO
        else:
            wanted = (block or bytes(BLOCK) for block in filled.blocks)
            assert answer == b"".join(wanted)[:whole]
        answer = shell.request(f"read {40 * UNIT} {BLOCK}")
        assert answer == (errno.EIO if policy == "error" else bytes(BLOCK))


@pytest.mark.parametrize("other", ["./map", "link/map", "hard"])
def test_a_map_has_one_name(
    sanitized_build: Path, filled: VirtualData, tmp_path: Path, other: str
) -> None:
    """It would be opened twice: two servers' worth of locks and additions in one."""
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "hard").hardlink_to(filled.map)
    parts = [
        lazy(tmp_path, length=UNIT),
        lazy(tmp_path, length=UNIT, map=f"{tmp_path}/{other}"),
    ]
    said = refusal(EngineShell, sanitized_build, describe(*parts))
    assert f"'{tmp_path}/{other}' is the same file as '{filled.map}'" in said


def test_a_source_that_changes(
    sanitized_build: Path, virtual: VirtualData, tmp_path: Path
) -> None:
    """An error, never other bytes; also when it looks as before, and in another run."""
    path = virtual.add_file("file", 0, 4 * UNIT)
    before = path.stat()
    description = describe(lazy(tmp_path, cached=False))
    with EngineShell(sanitized_build, description) as shell:
        assert shell.request(f"read 0 {BLOCK}") == virtual.content(0, BLOCK)
    path.write_bytes(bytes(4 * UNIT))
    with EngineShell(sanitized_build, description) as shell:
        assert shell.request(f"read 0 {BLOCK}") == errno.EIO
    # The pinned digest knows it even where the identity says nothing.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with EngineShell(sanitized_build, description) as shell:
        assert shell.request(f"read 0 {BLOCK}") == errno.EIO
        failures = shell.stats()["lazy"][0]["fetcher"]["failures"]
        assert failures["wrong_digest"] == 3


@pytest.mark.parametrize("digests", [False, True])
def test_a_source_is_another_file_with_the_same_bytes(
    sanitized_build: Path, virtual: VirtualData, tmp_path: Path, digests: bool
) -> None:
    """As from a backup: digests prove that it is right; nothing else does."""
    path = virtual.add_file("file", 0, 4 * UNIT, digests=digests)
    description = describe(lazy(tmp_path, cached=False))
    with EngineShell(sanitized_build, description) as shell:
        assert shell.request(f"read 0 {BLOCK}") == virtual.content(0, BLOCK)
    shutil.copy2(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    with EngineShell(sanitized_build, description) as shell:
        for offset in (0, 2 * UNIT):
            answer = shell.request(f"read {offset} {BLOCK}")
            assert answer == (virtual.content(offset, BLOCK) if digests else errno.EIO)
        problems = shell.map_request("map-verify", ask=True)["map-verify"]["problems"]
    assert len(problems) == (not digests)


def test_wrong_from_the_first(
    sanitized_build: Path, virtual: VirtualData, tmp_path: Path
) -> None:
    path = virtual.add_file("file", 0, 4 * UNIT, digests=True)
    data = bytearray(path.read_bytes())
    data[UNIT] ^= 1
    path.write_bytes(data)
    with EngineShell(sanitized_build, describe(lazy(tmp_path))) as shell:
        assert shell.request(f"read {UNIT} {BLOCK}") == errno.EIO
        assert shell.request(f"read {UNIT - BLOCK} {2 * BLOCK}") == errno.EIO
        assert shell.request(f"read 0 {BLOCK}") == virtual.content(0, BLOCK)


@pytest.fixture(params=["memory", "disk"])
def cache_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Read by system calls, or through the ring (features.md)."""
    if request.param == "memory":
        yield tmp_path / "cache"
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="btrfs-ublk-") as directory:
        yield Path(directory)


def spoil(cache: Path, draw: random.Random) -> None:
    """Flip bits and punch holes, in data and sums."""
    for path in cache.glob("*.data"):
        size = path.stat().st_size
        for _ in range(3):
            hole = draw.randrange(size // BLOCK + 1) * BLOCK
            punch_hole(path, hole, draw.choice([1, 16]) * BLOCK)
        with path.open("r+b") as file:
            for _ in range(20):
                at = draw.randrange(size)
                file.seek(at)
                byte = file.read(1)[0] ^ 1 << draw.randrange(8)
                file.seek(at)
                file.write(bytes([byte]))


@pytest.mark.data
def test_rot_in_the_cache(
    sanitized_build: Path, filled: VirtualData, tmp_path: Path, cache_path: Path
) -> None:
    """It is fetched again, or EIO where that cannot be; never delivered."""
    draw = random.Random(11)
    segment = lazy(tmp_path, cache=str(cache_path))
    blocks = [at * BLOCK for at, block in enumerate(filled.blocks) if block]
    with EngineShell(sanitized_build, describe(segment)) as shell:
        for _ in range(4):
            spoil(cache_path, draw)
            for offset in draw.sample(blocks, len(blocks)):
                answer = shell.request(f"read {offset} {BLOCK}")
                assert answer == filled.content(offset, BLOCK), offset
            shell.wait_until_cached()
        stats = shell.stats()["lazy"][0]
        assert stats["cache"]["dropped_units"] > 10
        for offset in blocks:
            shell.request(f"read {offset} {BLOCK}")
        again = shell.stats()["lazy"][0]["cache"]["dropped_units"]
        assert again == stats["cache"]["dropped_units"]
    # And without its sources.
    for name in ["plain", "digests", "tiny", *(f"block-{n}" for n in range(16))]:
        (tmp_path / name).unlink()
    with EngineShell(sanitized_build, describe(segment | {"deadline_s": 0.5})) as shell:
        spoil(cache_path, draw)
        failed = 0
        for offset in draw.sample(blocks, len(blocks)):
            answer = shell.request(f"read {offset} {BLOCK}")
            assert answer in (filled.content(offset, BLOCK), errno.EIO), offset
            failed += answer == errno.EIO
            if failed > 10:
                break
        assert failed


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"map": "/nonexistent/map"}, "/nonexistent"),
        ({"cache": "/nonexistent/a/cache"}, "/nonexistent"),
        ({"map_offset": 1}, "not a multiple of 4096"),
        ({"map_offset": (1 << 63) - 4096}, "beyond 8 EiB"),
        ({"deadline_s": 0}, "positive number"),
    ],
)
def test_refused(
    sanitized_build: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    segment = lazy(tmp_path, **keys)
    assert message in refusal(EngineShell, sanitized_build, describe(segment))
