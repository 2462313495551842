"""The map file (csrc/content/store/): what is one, and what is refused."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.shells import StoreShell

MEMSET = {"kind": "memset", "size": 1 << 40, "byte": 7}
PATTERN = {"kind": "pattern", "size": 1 << 40}

Open = Callable[[], AbstractContextManager[StoreShell]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "it.map"


@pytest.fixture
def again(sanitized_build: Path, path: Path) -> Open:
    return lambda: StoreShell(sanitized_build, path)


def refusal(build: Path, path: Path) -> dict[str, Any]:
    with StoreShell(build, path) as shell:
        assert "error" in shell.opened, shell.opened
        return shell.opened


def test_what_is_no_map_is_refused(
    sanitized_build: Path, path: Path, tmp_path: Path
) -> None:
    path.write_bytes(b"no database at all " * 1000)
    path.chmod(0o600)
    content = path.read_bytes()
    assert refusal(sanitized_build, path)["error"] == "EUCLEAN"
    assert path.read_bytes() == content
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mappings(a)")
    connection.close()
    path.chmod(0o600)
    assert "another program's" in refusal(sanitized_build, path)["text"]
    path.unlink()
    path.mkdir()
    assert "no regular file" in refusal(sanitized_build, path)["text"]
    path.rmdir()
    os.mkfifo(path, 0o600)
    assert "no regular file" in refusal(sanitized_build, path)["text"]
    reply = refusal(sanitized_build, tmp_path / "nowhere" / "it.map")
    assert reply["error"] == "ENOENT" and "directory" in reply["hint"]


def test_an_empty_file_is_an_empty_map(again: Open, path: Path) -> None:
    path.touch(mode=0o600)
    with again() as shell:
        assert shell.opened["mappings"] == 0


def test_a_newer_version_is_refused(
    sanitized_build: Path, again: Open, path: Path
) -> None:
    with again() as shell:
        shell.add([[0, 4096, 0, 0]], MEMSET)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=4")
    connection.close()
    reply = refusal(sanitized_build, path)
    assert reply["error"] == "EPROTONOSUPPORT" and "version 4" in reply["text"]
    assert "btrfs-ublk" in reply["hint"]


@pytest.mark.parametrize("beside", ["", "-wal", "-journal"])
def test_symbolic_links_are_not_followed(
    sanitized_build: Path, again: Open, path: Path, tmp_path: Path, beside: str
) -> None:
    with again():
        pass
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    Path(f"{path}{beside}").unlink(missing_ok=True)
    Path(f"{path}{beside}").symlink_to(victim)
    reply = refusal(sanitized_build, path)
    assert reply["error"] == "ELOOP" and "symbolic link" in reply["text"]
    assert victim.read_bytes() == b"mine"


def test_a_directory_may_be_a_symbolic_link(
    sanitized_build: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with StoreShell(sanitized_build, tmp_path / "link" / "it.map") as shell:
        assert shell.opened["path"] == str((tmp_path / "real" / "it.map").resolve())


def test_a_file_of_others_is_refused(
    sanitized_build: Path, again: Open, path: Path
) -> None:
    with again():
        pass
    path.chmod(0o640)
    reply = refusal(sanitized_build, path)
    assert reply["error"] == "EPERM" and "mode 640" in reply["text"]
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        assert "belongs to user 65534" in refusal(sanitized_build, path)["text"]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE mappings SET source_offset = source_offset + 4096",
        "UPDATE mappings SET length = 12288",
        "UPDATE mappings SET source = 9",
        "DELETE FROM sources",
        "UPDATE sources SET text = '{}'",
        "UPDATE sources SET text = '{'",
        "UPDATE sources SET key = x'00'",
        "INSERT INTO identities VALUES(1, 7, 'x')",
        "DROP TABLE pins",
    ],
)
def test_rows_that_make_no_sense_are_refused(
    sanitized_build: Path, again: Open, path: Path, damage: str
) -> None:
    with again() as shell:
        shell.add([[0, 8192, 0, 0], [8192, 4096, 0, 0]], MEMSET)
    with sqlite3.connect(path) as connection:
        connection.execute(damage)
    connection.close()
    assert refusal(sanitized_build, path)["error"] in ("EUCLEAN", "EINVAL")


@pytest.fixture(scope="module")
def whole(
    sanitized_build: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, list[list[int]]]:
    """A map file of 400 rows, and these."""
    path = tmp_path_factory.mktemp("whole") / "it.map"
    mappings: list[list[int | None]] = [
        [8192 * number, 4096, number % 2, 4096 * number] for number in range(400)
    ]
    with StoreShell(sanitized_build, path) as shell:
        shell.add(mappings, MEMSET, PATTERN)
        rows = shell.list()
    return path.read_bytes(), rows


@given(st.data())
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_damaged_file_is_refused_or_right(
    sanitized_build: Path,
    tmp_path_factory: pytest.TempPathFactory,
    whole: tuple[bytes, list[list[int]]],
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("map") / "it.map"
    content, expected = bytearray(whole[0]), whole[1]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[data.draw(st.integers(1, len(content) - 1)) :]
    path.write_bytes(content)
    with StoreShell(sanitized_build, path) as shell:
        if "error" not in shell.opened:
            # A row more or less would be another map.
            assert shell.list() == expected
