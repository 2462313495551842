"""``btrfs-ublk cache``, while servers use the cache."""

import hashlib
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.shells import CacheShell, key_of, refusal
from support.waiting import wait_until

from btrfs_ublk.cli.cache import command
from btrfs_ublk.content.cache import Cache, map_digests
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.units import KIB

UNIT = 64 * KIB
SIZE = 10 * UNIT + 5000

#: Those of a map's that count here.
TABLES = """
CREATE TABLE sources(id INTEGER PRIMARY KEY, key BLOB, list INTEGER);
CREATE TABLE digests(page INTEGER PRIMARY KEY, list BLOB);
CREATE TABLE pins(
    source INTEGER, unit INTEGER, digest BLOB, PRIMARY KEY(source, unit)
) WITHOUT ROWID;
"""

pytestmark = pytest.mark.usefixtures("sanitized_helpers")


def run_cache(directory: Path, *words: object, status: int = 0) -> Any:
    """What it prints, parsed; errors are raised as the command's own."""
    argv = [str(words[0]), "-d", str(directory), *map(str, words[1:]), "--json"]
    result = CliRunner().invoke(
        command, argv, standalone_mode=False, catch_exceptions=False
    )
    assert (result.return_value or 0) == status, result.output
    return json.loads(result.output)


def fill(shell: CacheShell, index: int = 0, key: str = "") -> None:
    assert shell.open(index, SIZE, UNIT, key=key) == "ok"
    for unit in range(11):
        assert shell.line("put", index, unit) == "ok"
    assert shell.line("sync") == "ok"


def test_status_of_a_cache_in_use(sanitized_build: Path, tmp_path: Path) -> None:
    with CacheShell(sanitized_build, tmp_path) as shell:
        fill(shell)
        shell.open(1, SIZE, UNIT)
        shell.line("put 1 10")
        shell.line("sync")
        Cache(tmp_path).pin(key_of(1))
        status = run_cache(tmp_path, "status")
        assert status["cached_bytes"] == 10 * UNIT + 2 * 8192
        first, second = status["contents"]
        assert first["key"] == key_of(0) and second["key"] == key_of(1)
        assert (first["cached_units"], first["units"], first["size"]) == (11, 11, SIZE)
        assert (first["pinned"], second["pinned"]) == (False, True)
        assert first["in_use"] and second["cached_bytes"] == 8192
        assert abs(time.time() - first["last_use_s"]) < 60
    assert not run_cache(tmp_path, "status")["contents"][0]["in_use"]


def test_prunes_under_a_server(sanitized_build: Path, tmp_path: Path) -> None:
    with CacheShell(sanitized_build, tmp_path) as shell:
        fill(shell)
        fill(shell, 1)
        report = run_cache(tmp_path, "prune", "--to", f"{8 * UNIT}")
        assert report["cached_bytes"] <= 8 * UNIT
        assert set(shell.line("check 0") + shell.line("check 1")) == {"o", "m"}
        run_cache(tmp_path, "prune", "--content", key_of(0))
        assert shell.line("check 0") == "m" * 11
        # It goes on as if nothing had been.
        assert shell.line("put 0 5") == "ok"
        assert shell.line("read 0 5 5") == "ok"
    run_cache(tmp_path, "prune", "--content", key_of(0), "--content", key_of(1))
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "state"}


def test_leaves_what_is_pinned(sanitized_build: Path, tmp_path: Path) -> None:
    with CacheShell(sanitized_build, tmp_path) as shell:
        fill(shell)
        cache = Cache(tmp_path)
        cache.pin(key_of(0))
        assert run_cache(tmp_path, "prune", "--to", "0")["evicted_bytes"] == 0
        with pytest.raises(BtrfsUblkError, match="is pinned") as refused:
            cache.remove(key_of(0))
        assert "unpin" in str(refused.value.hint)
        cache.unpin(key_of(0))
        assert run_cache(tmp_path, "prune", "--to", "0")["cached_bytes"] == 0


def limit(directory: Path, *words: str) -> None:
    CliRunner().invoke(
        command,
        ["limit", "-d", str(directory), *words],
        standalone_mode=False,
        catch_exceptions=False,
    )


def test_limits_hold_for_all_servers(sanitized_build: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    limit(directory, "--max", f"{20 * UNIT}", "--reserve", "4096")
    # NB: a shell with limits of its own would not look at those.
    with CacheShell(sanitized_build, directory, reserve_bytes=0) as shell:
        fill(shell)
        stats = shell.stats()
        assert (stats["max_bytes"], stats["reserve_bytes"]) == (20 * UNIT, 4096)
        limit(directory, "--max", f"{4 * UNIT}", "--reserve", "4096")
        assert run_cache(directory, "status")["cached_bytes"] <= 4 * UNIT
        wait_until(lambda: shell.stats()["max_bytes"] == 4 * UNIT, shell.stats)
        fill(shell, 1)
        assert shell.stats()["bytes"] <= 4 * UNIT
        (directory / "limits").write_text("{}")
    assert "limits" in refusal(CacheShell, sanitized_build, directory, reserve_bytes=0)


def digests_of(directory: Path, key: str) -> bytes:
    data = (directory / f"{key}.data").read_bytes()[:SIZE]
    return b"".join(
        hashlib.sha256(data[at : at + UNIT]).digest() for at in range(0, SIZE, UNIT)
    )


def spoil(directory: Path, key: str, unit: int) -> None:
    with (directory / f"{key}.data").open("r+b") as file:
        file.seek(unit * UNIT + 77)
        file.write(b"wrong")


def keyed_by_content(build: Path, tmp_path: Path) -> tuple[Path, str, bytes]:
    """A cache whose content has the key that its digests give it."""
    with CacheShell(build, tmp_path / "first") as shell:
        fill(shell)
    # NB: what cache-shell puts follows from the key; only the digests count here.
    digests = digests_of(tmp_path / "first", key_of(0))
    return tmp_path / "first", key_of(0), digests


def test_verifies_against_a_map(sanitized_build: Path, tmp_path: Path) -> None:
    directory, key, digests = keyed_by_content(sanitized_build, tmp_path)
    path = tmp_path / "map"
    connection = sqlite3.connect(path)
    connection.executescript(TABLES)
    connection.execute("INSERT INTO sources VALUES (3, ?, 3)", (bytes.fromhex(key),))
    connection.execute("INSERT INTO digests VALUES (?, ?)", (3 << 32, digests))
    other = bytes.fromhex(key_of(1))
    connection.execute("INSERT INTO sources VALUES (4, ?, NULL)", (other,))
    connection.execute("INSERT INTO pins VALUES (4, 2, ?)", (bytes(32),))
    connection.commit()
    connection.close()
    with map_digests(path) as known:
        assert known[key_of(1)](2) == bytes(32)
        assert known[key_of(1)](3) is None
    with CacheShell(sanitized_build, directory) as shell:
        shell.open(0, SIZE, UNIT)
        assert run_cache(directory, "verify", "--map", path)["right"] == 11
        spoil(directory, key, 4)
        report = run_cache(directory, "verify", "--map", path, status=1)
        assert report["wrong"] == [[key, 4]] and report["right"] == 10
        assert shell.line("check 0") == "oooomoooooo"
        assert run_cache(directory, "verify", "--map", path)["clean"]


def test_verifies_by_checksums(sanitized_build: Path, tmp_path: Path) -> None:
    with CacheShell(sanitized_build, tmp_path) as shell:
        fill(shell)
        spoil(tmp_path, key_of(0), 4)
        report = run_cache(tmp_path, "verify", status=1)
        assert report["wrong"] == [[key_of(0), 4]] and report["unknown"] == 10
        assert shell.line("check 0") == "oooomoooooo"
        assert run_cache(tmp_path, "verify")["clean"]


def test_shares_a_cache_that_is_stressed(sanitized_build: Path, tmp_path: Path) -> None:
    shell = CacheShell(sanitized_build, tmp_path)
    try:
        shell.open(0, SIZE, UNIT)
        shell.send("stress 3 3")
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            run_cache(tmp_path, "prune", "--to", 3 * UNIT)
            run_cache(tmp_path, "verify")
        assert shell.line().split()[-1] == "0"
        shell.close()
    finally:
        shell.kill()
