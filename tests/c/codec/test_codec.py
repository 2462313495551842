"""Compressed sources: indexes, and what is decoded by them; in a sanitizer build."""

import gzip
import hashlib
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import compressed
from support.sanitized_build import run_sanitized
from support.shells import StoreShell

from btrfs_ublk.content import digest_file, digest_indexed, make_index
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import KIB, MIB

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("sanitized_helpers")]

UNIT = 64 * KIB
SIZE = 3 * MIB + 4321
DATA = compressed.content(SIZE)
HEADER = struct.Struct("<8sII16s5Q")
POINT = struct.Struct("<QQII")

#: Codec, and what makes an object of some bytes.
OBJECTS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", lambda data: gzip.compress(data, 6)),
    "members": ("gzip", compressed.members),
    "stored": ("gzip", compressed.stored),
    "flushed": ("gzip", compressed.flushed),
    "seekable": ("zstd", lambda data: compressed.seekable(data, UNIT)),
    "sums": ("zstd", lambda data: compressed.seekable(data, 100_001, sums=True)),
    "skippable": (
        "zstd",
        lambda data: compressed.SKIPPABLE.join(compressed.frames(data, 99_999))
        + compressed.SKIPPABLE,
    ),
}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def indexed(path: Path, codec: str, *, spacing: int = 100_000) -> Path:
    output = path.with_name(f"{path.name}.index")
    made = make_index(path, output, codec=codec, spacing_bytes=spacing)
    assert made.coded_size == path.stat().st_size
    assert made.index_size == output.stat().st_size
    return output


@pytest.mark.parametrize("name", OBJECTS)
def test_what_is_read_is_what_was_compressed(tmp_path: Path, name: str) -> None:
    codec, compress = OBJECTS[name]
    path = write(tmp_path / "object", compress(DATA))
    index = indexed(path, codec)
    plain = write(tmp_path / "plain", DATA)
    for unit in (4 * KIB, MIB):
        expected = digest_file(plain, unit_bytes=unit)
        assert digest_indexed(path, index, unit_bytes=unit) == expected


BAD: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "no gzip": ("gzip", lambda: DATA, "cannot be decoded as gzip"),
    "cut": ("gzip", lambda: gzip.compress(DATA)[:-9], "it is cut"),
    "sum": (
        "gzip",
        lambda: gzip.compress(DATA)[:-8] + bytes(8),
        "incorrect data check",
    ),
    "no zstd": ("zstd", lambda: DATA, "no frame of zstd at 0"),
    "one frame": (
        "zstd",
        lambda: compressed.zstd(bytes(17 * MIB)),
        "would decode them",
    ),
    "window": (
        "zstd",
        lambda: compressed.zstd(DATA, "--long=27"),
        "a frame cannot be decoded: Frame requires too much memory",
    ),
    "table": (
        "zstd",
        lambda: compressed.seekable(DATA, UNIT)[5:],
        "table of frames is damaged",
    ),
    "codec": ("lz4", lambda: DATA, "unknown codec 'lz4'"),
}


@pytest.mark.parametrize("name", BAD)
def test_objects_that_have_no_index(tmp_path: Path, name: str) -> None:
    codec, make, says = BAD[name]
    path = write(tmp_path / "object", make())
    with pytest.raises(BtrfsUblkError, match=says):
        make_index(path, tmp_path / "index", codec=codec)
    assert not (tmp_path / "index").exists()


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    path = write(tmp_path / "object", gzip.compress(DATA))
    index = indexed(path, "gzip")
    with pytest.raises(BtrfsUblkError, match="it is no index"):
        digest_indexed(path, path)
    other = write(tmp_path / "other", gzip.compress(DATA[::-1]))
    with pytest.raises(BtrfsUblkError, match="is an index of [0-9]+ bytes, and"):
        digest_indexed(other, index)
    same = write(tmp_path / "same", bytes(path.stat().st_size))
    with pytest.raises(BtrfsUblkError, match="at 0 is not what the index says"):
        digest_indexed(same, index)
    with pytest.raises(UsageError, match="3 bytes"):
        digest_indexed(path, index, unit_bytes=3)


# In a map.


def source_of(path: Path, codec: str, index: Path, **keys: Any) -> dict[str, Any]:
    return {
        **{"kind": "file", "path": str(path), "unit": UNIT},
        **{"codec": codec, "index": {"path": str(index)}},
        **keys,
    }


def add(shell: StoreShell, source: dict[str, Any]) -> dict[str, Any]:
    return shell.add([[0, 4 * KIB, 0, 0]], source)


@pytest.fixture
def gzipped(tmp_path: Path) -> tuple[Path, Path]:
    path = write(tmp_path / "object", gzip.compress(DATA))
    return path, indexed(path, "gzip")


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_a_map_keeps_the_index(
    sanitized_build: Path, tmp_path: Path, gzipped: tuple[Path, Path]
) -> None:
    path, index = gzipped
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        shell.add([[MIB, 4 * KIB, 0, 0]], {"kind": "memset", "byte": 1, "size": MIB})
    assert version_of(tmp_path / "map") == 1  # as long as older servers understand it
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        assert add(shell, source_of(path, "gzip", index))["added"] == [[0, False]]
        assert add(shell, source_of(path, "gzip", index))["added"] == [[0, True]]
    assert version_of(tmp_path / "map") == 2
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    index.unlink()
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        text = shell.ask(source=2)["source"]
        assert (text["codec"], text["index"]) == ("gzip", digest)
        assert (text["size"], text["coded_size"]) == (SIZE, path.stat().st_size)
        assert add(shell, text)["added"] == [[0, True]]
        unknown = add(shell, text | {"index": "0" * 64})
        assert "the map has no such source" in unknown["text"]


def test_a_damaged_index_is_not_loaded(
    sanitized_build: Path, tmp_path: Path, gzipped: tuple[Path, Path]
) -> None:
    path, index = gzipped
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        add(shell, source_of(path, "gzip", index))
    with closing(sqlite3.connect(tmp_path / "map")) as db, db:
        part = bytearray(db.execute("SELECT part FROM layouts").fetchone()[0])
        part[HEADER.size + POINT.size] ^= 255
        part[HEADER.size + POINT.size + 7] ^= 128
        db.execute("UPDATE layouts SET part = ?", (bytes(part),))
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        assert "of the index is wrong" in shell.opened["text"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"codec": "lz4"}, '"codec" is "lz4", which is unknown'),
        ({"codec": "zstd"}, "is an index for the codec gzip, not for zstd"),
        ({"index": "0" * 64}, 'the codec gzip needs "index": {"path": FILE}'),
        ({"index": {"path": "/nowhere/i"}}, "cannot open index '/nowhere/i'"),
        ({"size": 17}, f'"size" is 17, and the index says {SIZE}'),
        ({"kind": "pattern", "path": None}, "a computed source has no codec"),
        ({"codec": None}, 'an "index" without a "codec"'),
    ],
)
def test_what_is_not_added(
    sanitized_build: Path,
    tmp_path: Path,
    gzipped: tuple[Path, Path],
    keys: dict[str, Any],
    says: str,
) -> None:
    source = source_of(gzipped[0], "gzip", gzipped[1]) | keys
    source = {key: value for key, value in source.items() if value is not None}
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        answer = add(shell, source)
        assert says in answer["text"]
    assert version_of(tmp_path / "map") == 1


def lie(index: Path, at: int, value: int) -> None:
    """Change one of the numbers of the header."""
    data = bytearray(index.read_bytes())
    fields = list(HEADER.unpack_from(data))
    fields[4 + at] = value
    HEADER.pack_into(data, 0, *fields)
    index.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, 0, "the index says that 0 bytes come of"),
        (0, SIZE + (17 << 20), "the next one is too far away"),
        (0, 10, "it is behind the end"),
        (1, 0, "bytes come of 0"),
        (3, 0, "the index has 0 points"),
        (3, 5, "the index is damaged"),
        (4, 1 << 50, "at most"),
    ],
)
def test_numbers_that_lie(
    sanitized_build: Path,
    tmp_path: Path,
    gzipped: tuple[Path, Path],
    at: int,
    value: int,
    says: str,
) -> None:
    path, index = gzipped
    lie(index, at, value)
    with StoreShell(sanitized_build, tmp_path / "map") as shell:
        assert says in add(shell, source_of(path, "gzip", index))["text"]


@pytest.mark.parametrize("name", ["members", "skippable"])
def test_many_changes(sanitized_build: Path, tmp_path: Path, name: str) -> None:
    codec, compress = OBJECTS[name]
    path = write(tmp_path / "object", compress(DATA[:MIB]))
    indexed(path, codec, spacing=50_000)
    fuzz = sanitized_build / "csrc/tests/fuzz-codec"
    run_sanitized(fuzz, "--iterations", 150, path)
