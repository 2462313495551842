"""Lazy segments over compressed sources that a server of HTTP has."""

import errno
import gzip
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import compressed
from support.needs import Need
from support.shells import (
    BLOCK,
    UNIT,
    EngineShell,
    StoreShell,
    VirtualData,
    describe,
    units_of,
)
from support.web_servers import NGINX, WebServer, web_server

from btrfs_ublk.content import make_index
from btrfs_ublk.units import KIB

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("sanitized_helpers")]

SIZE = 24 * UNIT
DATA = compressed.content(SIZE - 1234, seed=5)
DEADLINE_S = 60.0
#: Of reads that nothing can answer.
SHORT_DEADLINE_S = 2.0
OBJECTS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "members": ("gzip", compressed.members),
    "unaligned": ("zstd", lambda data: compressed.seekable(data, 99_999, sums=True)),
}


@pytest.fixture
def web(need: Need, tmp_path: Path) -> Iterator[WebServer]:
    need(NGINX)
    with web_server(tmp_path / "web") as server:
        yield server


@pytest.fixture(params=["gzip", "members", "unaligned"])
def codec(request: pytest.FixtureRequest, web: WebServer) -> str:
    """The codec of an object that the server has; its index is beside it."""
    name, compress = OBJECTS[request.param]
    write(web, compress(DATA), name)
    return name


def write(web: WebServer, data: bytes, codec: str) -> None:
    path = web.files / "object"
    path.write_bytes(data)
    make_index(path, web.root / "index", codec=codec, spacing_bytes=100 * KIB)


def source_of(web: WebServer, codec: str, *, digests: bool) -> dict[str, Any]:
    source: dict[str, Any] = {
        **{"kind": "http", "url": web.url("files/object"), "unit": UNIT},
        **{"codec": codec, "index": {"path": str(web.root / "index")}},
    }
    if digests:
        source["digests"] = [unit.hex() for unit in units_of(DATA, UNIT)]
    return source


def lazy(directory: Path, **keys: Any) -> dict[str, Any]:
    paths = {"map": str(directory / "map"), "cache": str(directory / "cache")}
    return {"kind": "lazy", "length": SIZE, "deadline_s": DEADLINE_S, **paths, **keys}


def read_at_random(shell: EngineShell, virtual: VirtualData, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        length = draw.choice([1, 1, 3, 16, 33]) * BLOCK
        offset = draw.randrange((SIZE - length) // BLOCK) * BLOCK
        answer = shell.request(f"read {offset} {length}")
        assert answer == virtual.content(offset, length), (offset, length)


@pytest.mark.parametrize("digests", [False, True])
def test_random_reads_cold_and_cached(
    sanitized_build: Path, web: WebServer, tmp_path: Path, codec: str, digests: bool
) -> None:
    virtual = VirtualData(sanitized_build, tmp_path, SIZE)
    virtual.add(source_of(web, codec, digests=digests), DATA, 0)
    description = describe(lazy(tmp_path))
    with EngineShell(sanitized_build, description) as shell:
        read_at_random(shell, virtual, 1)
        for offset in range(0, SIZE, UNIT):
            answer = shell.request(f"read {offset} {UNIT}")
            assert answer == virtual.content(offset, UNIT), offset
        counts = shell.stats()["lazy"][0]["fetcher"]
        assert counts["read_errors"] == counts["retries"] == 0
        if digests:
            assert counts["units_verified"] == SIZE // UNIT
        else:
            assert counts["units_pinned"] == SIZE // UNIT
    # All is in the cache, decoded.
    (web.files / "object").unlink()
    with EngineShell(sanitized_build, description) as shell:
        read_at_random(shell, virtual, 2)
        assert shell.stats()["lazy"][0]["fetcher"]["units_fetched"] == 0


@pytest.mark.parametrize(
    ("codec", "how", "digests"),
    [
        ("gzip", "flip", True),
        ("gzip", "bomb", True),
        ("gzip", "zeroes", False),
        ("unaligned", "another", True),
    ],
    indirect=["codec"],
)
def test_another_object_is_never_read(
    sanitized_build: Path,
    web: WebServer,
    tmp_path: Path,
    codec: str,
    digests: bool,
    how: str,
) -> None:
    """It has the size that the index says, and other bytes."""
    path = web.files / "object"
    good = path.read_bytes()
    virtual = VirtualData(sanitized_build, tmp_path, SIZE)
    virtual.add(source_of(web, codec, digests=digests), DATA, 0)
    bad = {
        # Often enough that hardly a unit is left as it was.
        "flip": bytes(x ^ (at % 64 == 40) for at, x in enumerate(good)),
        "zeroes": bytes(len(good)),
        "bomb": gzip.compress(bytes(64 << 20), 9),
        "another": (
            gzip.compress(DATA[::-1])
            if codec == "gzip"
            else compressed.seekable(DATA[::-1], UNIT)
        ),
    }[how]
    path.write_bytes((bad + bytes(len(good)))[: len(good)])
    segment = lazy(tmp_path, deadline_s=SHORT_DEADLINE_S)
    with EngineShell(sanitized_build, describe(segment)) as shell:
        answers = {
            at: shell.request(f"read {at} {BLOCK}") for at in range(0, SIZE, 9 * UNIT)
        }
    if digests:
        # Some zeroes are right all the same.
        for at, answer in answers.items():
            assert answer in (errno.EIO, virtual.content(at, BLOCK)), at
    if digests or how == "zeroes":
        assert errno.EIO in answers.values()
    # What was refused was not kept either.
    path.write_bytes(good)
    if digests:
        with EngineShell(sanitized_build, describe(lazy(tmp_path))) as shell:
            read_at_random(shell, virtual, 3)


def test_a_table_that_lies(
    sanitized_build: Path, web: WebServer, tmp_path: Path
) -> None:
    """It says that a frame is longer, and the next one shorter, than they are."""
    data = bytearray(compressed.seekable(DATA, UNIT))
    table = len(data) - 9 - 8 * (SIZE // UNIT)
    for number, change in ((3, 1000), (4, -1000)):
        entry = table + 8 * number + 4
        size = int.from_bytes(data[entry : entry + 4], "little") + change
        data[entry : entry + 4] = size.to_bytes(4, "little")
    write(web, bytes(data), "zstd")
    source = source_of(web, "zstd", digests=False) | {"unit": BLOCK}
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        assert "added" in shell.add([[0, SIZE, 0, 0]], source)
    segment = lazy(tmp_path, deadline_s=SHORT_DEADLINE_S)
    with EngineShell(sanitized_build, describe(segment)) as engine:
        assert engine.request(f"read {5 * UNIT - BLOCK} {BLOCK}") == errno.EIO
    with EngineShell(sanitized_build, describe(lazy(tmp_path))) as engine:
        assert engine.request(f"read {8 * UNIT} {BLOCK}") == DATA[8 * UNIT :][:BLOCK]
