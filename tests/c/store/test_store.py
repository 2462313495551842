"""The map file (csrc/content/store/): what is added, and what is there afterwards."""

import os
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.shells import StoreShell, root_of, units_of

pytestmark = pytest.mark.data

BLOCK = 4096
MIB = 1 << 20
MEMSET = {"kind": "memset", "size": 1 << 40, "byte": 7}
PATTERN = {"kind": "pattern", "size": 1 << 40}
DIGEST = "ab" * 32

Open = Callable[..., AbstractContextManager[StoreShell]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "it.map"


@pytest.fixture
def shell(sanitized_build: Path, path: Path) -> Iterator[StoreShell]:
    with StoreShell(sanitized_build, path) as opened:
        assert "error" not in opened.opened, opened.opened
        yield opened


@pytest.fixture
def again(sanitized_build: Path, path: Path) -> Open:
    return lambda **keys: StoreShell(sanitized_build, path, **keys)


def file_source(path: Path, **keys: Any) -> dict[str, Any]:
    return {"kind": "file", "path": str(path), **keys}


def added(*pairs: tuple[int, bool]) -> dict[str, Any]:
    return {"added": [list(pair) for pair in pairs]}


# What is added


def test_what_was_added_is_there_after_a_restart(again: Open, path: Path) -> None:
    with again() as shell:
        assert shell.opened["mappings"] == shell.opened["sources"] == 0
        reply = shell.add([[8192, 4096, 0, 0], [0, 8192, 1, 4096]], MEMSET, PATTERN)
        assert reply == added((8192, False), (0, False))
        expected = [[0, 8192, 2, 4096], [8192, 4096, 1, 0]]
        assert shell.list() == expected
        shell.kill()
    with again() as shell:
        assert (shell.opened["mappings"], shell.opened["sources"]) == (2, 2)
        assert shell.list() == expected
        assert shell.ask(check=True) == {"ok": True}
    assert (path.stat().st_mode & 0o777, list(path.parent.iterdir())) == (0o600, [path])


def test_a_repetition_changes_nothing(shell: StoreShell) -> None:
    sources = [MEMSET, {"size": 1 << 40, "unit": 262144, "mirrors": [PATTERN | {}]}]
    del sources[1]["mirrors"][0]["size"]  # type: ignore[attr-defined]
    first = shell.add([[0, 4096, 0, 0], [4096, 4096, 1, 0]], *sources)
    assert first == added((0, False), (4096, False))
    # The same sources in other words.
    again = shell.add(
        [[4096, 4096, 0, 0], [0, 4096, 1, 0], [8192, 4096, 0, 0]],
        PATTERN,
        MEMSET | {"unit": 262144},
    )
    assert again == added((4096, True), (0, True), (8192, False))
    assert shell.list() == [[0, 4096, 1, 0], [4096, 4096, 2, 0], [8192, 4096, 2, 0]]
    # And twice in one request, which also describes one source twice.
    twice = shell.add([[MIB, 4096, 0, 0], [MIB, 4096, 1, 0]], MEMSET, MEMSET)
    assert twice == added((MIB, False), (MIB, True))
    other = MEMSET | {"byte": 8}
    twice = shell.add([[2 * MIB, 4096, 1, 0], [2 * MIB, 4096, 0, 0]], other, other)
    assert twice == added((2 * MIB, False), (2 * MIB, True))
    assert shell.ask(source=4) == {"error": "ENOENT", "text": "", "hint": ""}


@pytest.mark.parametrize(
    "mapping",
    [
        [4096, 4096, 0, 4096],  # the same range, to something else
        [0, 8192, 0, 0],
        [8192, 8192, 0, 0],
        [4096, 4096, 1, 0],
        [8192, 4096, 0, 8192],
    ],
)
def test_the_mapping_in_the_way_is_named(
    shell: StoreShell, mapping: list[int | None]
) -> None:
    shell.add([[4096, 8192, 0, 0]], MEMSET)
    reply = shell.add([[MIB, 4096, 0, 0], mapping], MEMSET, PATTERN)
    assert reply["error"] == "EEXIST"
    assert "8192 bytes at 4096, to source 1 at 0" in reply["text"]
    assert (reply["of"], reply["number"]) == ("mapping", 1)
    # All or none: neither the other mapping nor the other source is there.
    assert shell.list() == [[4096, 8192, 1, 0]]
    assert "error" in shell.ask(source=2)
    assert shell.add([[MIB, 4096, 0, 0]], PATTERN) == added((MIB, False))


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ([1, 4096, 0, 0], "multiples of 4096"),
        ([0, 4095, 0, 0], "multiples of 4096"),
        ([0, 4096, 0, 512], "multiples of 4096"),
        ([0, 0, 0, 0], "length is 0"),
        ([0, 1 << 41, 0, 0], "of a source that has"),
        ([0, 4096, 0, 1 << 40], "of a source that has"),
        ([0, 4096, 0, (1 << 63) - 4096], "of a source that has"),
        ([(1 << 63) - 4096, 8192, 0, 0], "behind 2^63"),
        ([0, (1 << 63) - 4096, 0, 4096], "of a source that has"),
        ([0, 4096, 1, 0], "source 1 is not among the 1"),
        ([None, 4096, 0, 0], "alignment"),
    ],
)
def test_ranges_that_make_no_sense(
    shell: StoreShell, mapping: list[int | None], text: str
) -> None:
    reply = shell.add([mapping], MEMSET)
    assert reply["error"] == "EINVAL" and text in reply["text"], reply
    assert shell.list() == []


def test_offsets_are_found(shell: StoreShell) -> None:
    shell.add([[8192, 4096, 0, 0]], MEMSET)
    room = [0, 32768, 4096]
    reply = shell.add(
        [[None, 8192, 0, 0], [None, 8192, 0, 8192], [16384 + 4096, 4096, 0, 0]],
        PATTERN,
        room=room,
    )
    assert reply == added((0, False), (12288, False), (20480, False))
    # Of what is mapped to the same already, that is the place.
    assert shell.add([[None, 8192, 0, 8192]], PATTERN, room=room) == added(
        (12288, True)
    )
    assert shell.add([[None, 8192, 0, 0]], MEMSET, room=room) == added((24576, False))
    full = shell.add([[None, 4096, 0, 0]], MEMSET | {"byte": 9}, room=room)
    assert (
        full["error"] == "ENOSPC" and "4 KiB are free from 0 to 32768" in full["text"]
    )
    assert shell.add([[None, 4096, 0, 4096]], MEMSET, room=[0, 1 << 50, MIB]) == added(
        (MIB, False)
    )
    for bad in ([0, 1 << 50, 0], [0, 1 << 50, 100], [8192, 4096, 4096]):
        assert "error" in shell.add([[None, 4096, 0, MIB]], MEMSET, room=bad)


class Model:
    """Blocks that are mapped, and to what."""

    def __init__(self) -> None:
        self.mappings: dict[int, tuple[int, int, int]] = {}

    def conflict(self, offset: int, length: int) -> list[int]:
        return [
            at
            for at, (size, _, _) in self.mappings.items()
            if at < offset + length and offset < at + size
        ]

    def add(self, batch: list[tuple[int, int, int, int]]) -> bool:
        before = dict(self.mappings)
        for offset, *rest in batch:
            if self.mappings.get(offset) == tuple(rest):
                continue
            if self.conflict(offset, rest[0]):
                self.mappings = before
                return False
            self.mappings[offset] = (rest[0], rest[1], rest[2])
        return True


BATCHES = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.integers(1, 4), st.integers(0, 1), st.integers(0, 2)
        ).map(lambda x: (x[0] * BLOCK, x[1] * BLOCK, x[2], x[3] * BLOCK)),
        min_size=1,
        max_size=5,
    ),
    max_size=15,
)


@given(BATCHES, st.integers(0, 15))
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_all_or_none_whatever_is_asked(
    sanitized_build: Path,
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple[int, int, int, int]]],
    kill_after: int,
) -> None:
    path = tmp_path_factory.mktemp("map") / "it.map"
    model = Model()
    ids: list[int] = []  # of our two sources, in the order in which they came in

    def expected() -> list[list[int]]:
        return [
            [at, length, ids.index(source) + 1, source_at]
            for at, (length, source, source_at) in sorted(model.mappings.items())
        ]

    for number, batch in enumerate(batches):
        with StoreShell(sanitized_build, path) as shell:
            assert shell.list() == expected()
            reply = shell.add([list(row) for row in batch], MEMSET, PATTERN)
            assert ("added" in reply) == model.add(batch), reply
            if "added" in reply:
                for _, _, source, _ in batch:
                    if source not in ids:
                        ids.append(source)
            assert shell.list() == expected()
            if number == kill_after:
                shell.kill()
                break


def test_a_file_that_was_moved_is_noticed(shell: StoreShell, path: Path) -> None:
    shell.add([[0, 4096, 0, 0]], MEMSET)
    assert shell.ask(check=True) == {"ok": True}
    path.rename(path.with_name("elsewhere"))
    assert "moved or removed" in shell.ask(check=True)["text"]
    path.with_name("elsewhere").rename(path)
    assert shell.ask(check=True) == {"ok": True}
    # The lock did not go with the connection that had checked.
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        with sqlite3.connect(path, timeout=0) as connection:
            connection.execute("SELECT * FROM mappings").fetchall()


# Digests and pins


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(9 * MIB + 12345))
    return path


def digests_of(path: Path, unit_bytes: int) -> tuple[list[bytes], str]:
    digests = units_of(path.read_bytes(), unit_bytes)
    size = path.stat().st_size
    return digests, root_of(digests, size_bytes=size, unit_bytes=unit_bytes)


@pytest.mark.parametrize("inline", [True, False])
def test_digests_come_with_a_source(
    again: Open, data: Path, tmp_path: Path, inline: bool
) -> None:
    unit = 4096
    digests, root = digests_of(data, unit)
    (tmp_path / "digests").write_bytes(b"".join(digests))
    source = file_source(
        data,
        size=data.stat().st_size,
        unit=unit,
        digests=(
            [digest.hex() for digest in digests]
            if inline
            else {"path": str(tmp_path / "digests")}
        ),
    )
    with again() as shell:
        assert "added" in shell.add([[0, MIB, 0, 0]], source)
    with again() as shell:
        for unit_number in (0, 1, 125, 126, 127, 252, len(digests) - 1):
            found = shell.ask(digest=[1, unit_number])["digest"]
            assert found == digests[unit_number].hex()
        assert shell.ask(digest=[1, len(digests)])["error"] == "EUCLEAN"
        shown = shell.ask(source=1)
        assert shown["has_digests"] and shown["key"] == root
        # Shown without them; and so it may be named again.
        assert shown["source"]["root"] == root and "digests" not in shown["source"]
        assert shell.add([[MIB, MIB, 0, 0]], shown["source"]) == added((MIB, False))
        assert shell.ask(check_digests=1) == {"ok": True}
        # Another mirror of the same content shares them.
        other = source | {"path": "/else", "root": root}
        del other["digests"]
        assert "added" in shell.add([[2 * MIB, MIB, 0, 0]], other)
        assert shell.ask(digest=[2, 3])["digest"] == digests[3].hex()
        assert shell.ask(check_digests=2) == {"ok": True}
        for wrong in ({"size": source["size"] - 1}, {"unit": 8192}):
            reply = shell.add([[3 * MIB, MIB, 0, 0]], other | wrong)
            assert reply["error"] == "EINVAL" and "without digests" in reply["text"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"digests": []}, "0 digests for 4 units of 4096 bytes (16000 bytes in all)"),
        ({"digests": [DIGEST] * 3}, "3 digests for 4 units"),
        ({"digests": [DIGEST] * 3 + ["ab" * 31]}, "digest 3 is not 64"),
        ({"digests": {"path": "relative"}}, "not absolute"),
        ({"digests": {"path": "/nowhere/at/all"}}, "/nowhere/at/all"),
        ({"digests": {"path": "/dev/null"}}, "no regular file"),
        ({"root": "12"}, '"root" is not 64'),
        ({"root": "cd" * 32}, f'"root" is {"cd" * 32}, but the digests have'),
        ({"root": "cd" * 32, "digests": None}, '"digests" must be a list'),
        ({"unit": 5000}, '"unit" is 5000'),
    ],
)
def test_digests_and_keys_that_make_no_sense(
    shell: StoreShell, change: dict[str, Any], text: str
) -> None:
    source = {"kind": "file", "path": "/nowhere", "size": 16000, "unit": 4096}
    reply = shell.add([[0, 4096, 0, 0]], source | {"digests": [DIGEST] * 4} | change)
    assert reply["error"] in ("EINVAL", "ENOENT") and text in reply["text"], reply
    assert shell.list() == []


def test_an_identity_that_comes_with_a_source_is_pinned(
    again: Open, path: Path
) -> None:
    source = {"kind": "http", "url": "http://a.example/x", "size": MIB}
    listed = source | {"identity": 'etag "1"'}
    other = listed | {"identity": 'etag "2" modified yesterday'}
    with again() as shell:
        for number, each in enumerate((source, listed, other)):
            for existed in (False, True):
                reply = shell.add([[number * BLOCK, BLOCK, 0, 0]], each)
                assert reply == added((number * BLOCK, existed))
        for wrong in ("", "1", 7, "etag \n", f"etag {'x' * 400}"):
            error = shell.add([[0, BLOCK, 0, 0]], source | {"identity": wrong})
            assert "is not" in error["text"], wrong
        unsized = {key: value for key, value in listed.items() if key != "size"}
        error = shell.add([[0, BLOCK, 0, 0]], unsized)
        assert 'needs a "size"' in error["text"]
    with sqlite3.connect(path) as database:
        found = database.execute("SELECT * FROM identities").fetchall()
        texts = database.execute("SELECT DISTINCT text FROM sources").fetchall()
    assert found == [(2, 0, listed["identity"]), (3, 0, other["identity"])]
    assert len(texts) == 1


def test_pins_last(again: Open, data: Path) -> None:
    other = "cd" * 32
    with again() as shell:
        shell.add([[0, 4096, 0, 0]], file_source(data, size=data.stat().st_size))
        assert shell.ask(digest=[1, 5]) == {"digest": None}
        assert shell.ask(pin=[1, 5, DIGEST], threads=40) == {"ok": True}
        assert shell.ask(identity=[1, 0, "as it is"]) == {"ok": True}
        shell.kill()
    with again() as shell:
        assert shell.ask(digest=[1, 5]) == {"digest": DIGEST}
        assert shell.ask(digest=[1, 45]) == {"digest": None}
        assert shell.ask(pins=1) == {"pins": 40}
        assert shell.ask(source=1)["identities"] == ["as it is"]
        # The same again is no mistake; another one is.
        assert shell.ask(pin=[1, 5, DIGEST]) == {"ok": True}
        assert shell.ask(pin=[1, 5, other])["error"] == "ESTALE"
        assert shell.ask(pin=[1, 40, other], threads=10)["error"] == "ESTALE"
        assert shell.ask(digest=[1, 44]) == {"digest": DIGEST}
        assert shell.ask(digest=[1, 45]) == {"digest": other}  # who had a right to
        assert shell.ask(identity=[1, 0, "as it is"]) == {"ok": True}
        assert shell.ask(identity=[1, 0, "changed"])["error"] == "ESTALE"


def test_what_was_killed_goes_with_the_next_addition(again: Open, path: Path) -> None:
    """And not before the map is ready, as that may take long."""
    with again() as shell:
        shell.add([[4096, 4096, 0, 0]], PATTERN)
        shell.ask(random=[1000, MEMSET])
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE unfinished(sources INTEGER, runs BLOB)")
        runs = struct.pack("=4Q", 0, 0, 8192, 8192 * 999)
        db.execute("INSERT INTO unfinished VALUES(1, ?)", (runs,))
        db.execute("PRAGMA user_version=3")
    db.close()
    for _ in range(2):
        with again() as shell:
            assert (shell.opened["mappings"], shell.opened["sources"]) == (1, 1)
    with sqlite3.connect(path) as db:
        assert list(db.execute("SELECT count(*) FROM mappings")) == [(1001,)]
    db.close()
    with again() as shell:
        assert shell.add([[0, 4096, 0, 0]], MEMSET) == added((0, False))
    with sqlite3.connect(path) as db:
        assert list(db.execute("PRAGMA user_version")) == [(1,)]
        assert list(db.execute("SELECT count(*) FROM mappings")) == [(2,)]
    db.close()


# The file


def test_one_server_at_a_time(shell: StoreShell, again: Open, path: Path) -> None:
    shell.add([[0, 4096, 0, 0]], MEMSET)
    with again() as other:
        assert other.opened["error"] == "EBUSY" and str(path) in other.opened["text"]
    assert shell.add([[4096, 4096, 0, 0]], MEMSET) == added((4096, False))
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        with sqlite3.connect(path, timeout=0) as connection:
            connection.execute("SELECT * FROM mappings").fetchall()


# Caches in front of mirrors
