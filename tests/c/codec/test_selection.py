"""Sources that are selections of what comes out of compressed objects; in a sanitizer
build."""

import gzip
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import compressed
from support.compressed import HEADER, PIECE
from support.compressed import SELECTED_UNIT as HEAD
from support.compressed import Selection, select
from support.needs import Need
from support.sanitized_build import run_sanitized
from support.shells import EngineShell, StoreShell, describe, units_of
from support.web_servers import NGINX, WebServer, web_server

from btrfs_ublk.base.helpers import CODEC, helper_path
from btrfs_ublk.content import make_index
from btrfs_ublk.units import KIB, MIB

pytestmark = pytest.mark.usefixtures("sanitized_helpers")

UNIT = 64 * KIB
DATA = compressed.content(3 * MIB + 4321)
OBJECTS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "members": ("gzip", compressed.members),
    "frames": ("zstd", lambda data: compressed.seekable(data, 99_999)),
}


@pytest.fixture(params=OBJECTS)
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The codec of ``object``, beside which are its index and a selection."""
    name, compress = OBJECTS[request.param]
    make(tmp_path, name, compress(DATA))
    return name


def make(directory: Path, codec: str, data: bytes) -> Selection:
    path = directory / "object"
    path.write_bytes(data)
    make_index(path, directory / "object.index", codec=codec, spacing_bytes=100 * KIB)
    selection = select(DATA, UNIT)
    (directory / "object.selection").write_bytes(selection.file)
    return selection


def source_of(directory: Path, codec: str, **keys: Any) -> dict[str, Any]:
    return {
        **{"kind": "file", "path": str(directory / "object"), "unit": UNIT},
        **{"codec": codec, "index": {"path": str(directory / "object.index")}},
        "selection": {"path": str(directory / "object.selection")},
        **keys,
    }


def test_the_helper_reads_what_is_selected(tmp_path: Path, codec: str) -> None:
    path = str(tmp_path / "object")
    words = ("read", f"{path}.index", UNIT, path, f"{path}.selection")
    done = run_sanitized(Path(helper_path(CODEC)), *words)
    assert done.stdout == select(DATA, UNIT).data


@pytest.fixture
def web(need: Need, tmp_path: Path) -> Iterator[WebServer]:
    need(NGINX)
    with web_server(tmp_path / "web") as server:
        yield server


def test_the_server_reads_what_is_selected(
    sanitized_build: Path, web: WebServer, tmp_path: Path, codec: str
) -> None:
    """In any order, in one request for many units as well, cold and from the cache; and
    what was selected outlives the files."""
    data = select(DATA, UNIT).data
    (tmp_path / "object").rename(web.files / "object")
    source = source_of(tmp_path, codec, kind="http", url=web.url("files/object"))
    del source["path"]
    source["digests"] = [unit.hex() for unit in units_of(data, UNIT)]
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        answer = shell.add([[0, len(data), 0, 0]], source)
        assert answer["added"] == [[0, False]]
    for name in ("index", "selection"):
        (tmp_path / f"object.{name}").unlink()
    lazy = {"kind": "lazy", "length": len(data), "deadline_s": 4.0}
    lazy |= {"map": str(tmp_path / "map"), "cache": str(tmp_path / "cache")}
    with EngineShell(sanitized_build, describe(lazy)) as engine:
        for unit in (7, 3, 8):
            at = unit * UNIT + 4 * KIB
            assert engine.request(f"read {at} 8192") == data[at : at + 8192]
        whole = 0
        while whole < len(data):
            part = min(8 * UNIT, len(data) - whole)
            assert engine.request(f"read {whole} {part}") == data[whole : whole + part]
            whole += part
        counts = engine.stats()["lazy"][0]["fetcher"]
        assert counts["read_errors"] == counts["retries"] == 0
        assert counts["units_verified"] == len(data) // UNIT
    (web.files / "object").unlink()
    with EngineShell(sanitized_build, describe(lazy)) as engine:
        assert engine.request(f"read 0 {4 * UNIT}") == data[: 4 * UNIT]


def test_a_map_keeps_the_selection(sanitized_build: Path, tmp_path: Path) -> None:
    make(tmp_path, "gzip", gzip.compress(DATA))
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        added = shell.add([[0, 4 * KIB, 0, 0]], source_of(tmp_path, "gzip"))
        assert added["added"] == [[0, False]]
        text = shell.ask(source=1)["source"]
        assert text["size"] == len(select(DATA, UNIT).data)
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        assert shell.add([[0, 4 * KIB, 0, 0]], text)["added"] == [[0, True]]
    with closing(sqlite3.connect(tmp_path / "map")) as db, db:
        part = bytearray(db.execute("SELECT part FROM selections").fetchone()[0])
        part[HEADER.size + 7] ^= 128
        db.execute("UPDATE selections SET part = ?", (bytes(part),))
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        assert "unit 0 of the selection is wrong" in shell.opened["text"]


def changed(at: int, kind: struct.Struct, field: int, value: int) -> bytes:
    """A selection in which one number is another."""
    data = bytearray(select(DATA, UNIT).file)
    fields = list(kind.unpack_from(data, at))
    fields[field] = value
    kind.pack_into(data, at, *fields)
    return bytes(data)


UNITS = len(select(DATA, UNIT).data) // UNIT
PIECES = HEADER.size + UNITS * HEAD.size


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bytes(100), "it is no selection"),
        (changed(0, HEADER, 1, 2), "a selection of version 2"),
        (changed(0, HEADER, 2, 128 * KIB), "the selection is for units of 131072"),
        (changed(0, HEADER, 3, 0), "has 0 units"),
        (changed(0, HEADER, 3, UNITS + 1), "selection is "),
        (changed(0, HEADER, 4, 17), "it is behind the end of the object"),
        (changed(0, HEADER, 4, len(DATA) + 1), "is of an object of"),
        (changed(0, HEADER, 5, 7), "its units have"),
        (changed(HEADER.size, HEAD, 1, 0), "it has no bytes"),
        (changed(HEADER.size, HEAD, 1, 5 * MIB), "it has too many bytes or pieces"),
        (changed(HEADER.size, HEAD, 1, 3 * MIB), "it is not behind the one before"),
        (changed(HEADER.size, HEAD, 0, 1 << 40), "behind the end of the object"),
        (changed(PIECES, PIECE, 0, UNIT), "the pieces of unit 0"),
        (changed(PIECES, PIECE, 2, 0), "the pieces of unit 0"),
        (select(DATA, UNIT).file[:-1], "its pieces have"),
    ],
)
def test_selections_that_lie(
    sanitized_build: Path, tmp_path: Path, data: bytes, says: str
) -> None:
    make(tmp_path, "gzip", gzip.compress(DATA))
    (tmp_path / "object.selection").write_bytes(data)
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        answer = shell.add([[0, 4 * KIB, 0, 0]], source_of(tmp_path, "gzip"))
    assert says in answer["text"]


def test_many_changes(sanitized_build: Path, tmp_path: Path) -> None:
    make(tmp_path, "gzip", gzip.compress(DATA))
    fuzz = sanitized_build / "csrc/tests/fuzz-codec"
    run_sanitized(fuzz, "--iterations", 60, tmp_path / "object")
