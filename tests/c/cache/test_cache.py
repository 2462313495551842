"""The local cache of units: what is put, found, evicted, shared and refused."""

import errno
import os
import time
from pathlib import Path

import pytest
from support.shells import CacheShell, key_of, punch_hole, refusal
from support.waiting import wait_until

UNIT = 64 << 10
SIZE = 10 * UNIT + 5000  # the last of 11 units is short
SUMS_AT = 11 * UNIT


def data_file(directory: Path, index: int = 0) -> Path:
    return directory / f"{key_of(index)}.data"


def bits_file(directory: Path, index: int = 0) -> Path:
    return directory / f"{key_of(index)}.bits"


@pytest.mark.data
def test_puts_and_reads(sanitized_build: Path, tmp_path: Path) -> None:
    with CacheShell(sanitized_build, tmp_path / "cache") as shell:
        assert shell.open(0, SIZE, UNIT) == "ok"
        assert shell.line("read 0 0 0") == "miss"
        for unit in (0, 1, 10):
            assert shell.line("put 0", unit) == "ok"
        # At once, before it is durable, and after.
        for _ in range(2):
            assert shell.line("read 0 0 1") == "ok"
            assert shell.line("read 0 10 10") == "ok"
            assert shell.line("read 0 1 2") == "miss"
            assert shell.line("sync") == "ok"
        stats = shell.stats()
        assert stats["durable_units"] == 3
        assert stats["bytes"] == 2 * UNIT + 8192
        for wrong in ("read 0 10 11", "read 0 3 2"):
            assert shell.line(wrong) == "miss"
        assert shell.line("put 0 11") == f"error {errno.EINVAL}"


def test_frees_what_it_drops(sanitized_build: Path, tmp_path: Path) -> None:
    with CacheShell(sanitized_build, tmp_path) as shell:
        shell.open(0, SIZE, UNIT)
        for unit in range(11):
            shell.line("put 0", unit)
        shell.line("sync")
        full = data_file(tmp_path).stat().st_blocks
        for unit in range(11):
            assert shell.line("drop 0", unit) == "ok"
        assert shell.stats()["bytes"] == 0
        os.sync()
        assert full * 512 >= SIZE
        # What is left is the header, and what a file system needs for itself.
        assert data_file(tmp_path).stat().st_blocks * 512 <= 2 * 4096


def test_keeps_its_cap(sanitized_build: Path, tmp_path: Path) -> None:
    cap = 16 * UNIT
    with CacheShell(sanitized_build, tmp_path, max_bytes=cap) as shell:
        shell.open(0, 100 * UNIT, UNIT)
        for unit in range(100):
            assert shell.line("put 0", unit) == "ok"
            assert shell.stats()["bytes"] <= cap
        stats = shell.stats()
        assert stats["evicted_units"] >= 84
        assert shell.line("shrink", 3 * UNIT) == "ok"
        assert shell.stats()["bytes"] <= 3 * UNIT


def test_keeps_what_is_pinned(sanitized_build: Path, tmp_path: Path) -> None:
    with CacheShell(sanitized_build, tmp_path, max_bytes=8 * UNIT) as shell:
        shell.open(0, 8 * UNIT, UNIT)
        shell.open(1, 8 * UNIT, UNIT)
        (tmp_path / f"{key_of(0)}.pin").touch()
        for unit in range(8):
            assert shell.line("put 0", unit) == "ok"
        shell.line("sync")
        assert shell.line("put 1 0") == f"error {errno.ENOSPC}"
        assert shell.stats()["no_room"] == 1
        assert shell.line("read 0 0 7") == "ok"
        (tmp_path / f"{key_of(0)}.pin").unlink()
        wait_until(lambda: shell.line("put 1 0") == "ok")


@pytest.mark.parametrize("wrong", ["link", "file", "mode", "parent"])
def test_refuses_directories(sanitized_build: Path, tmp_path: Path, wrong: str) -> None:
    directory = tmp_path / "cache"
    if wrong == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "real")
    elif wrong == "file":
        directory.touch()
    elif wrong == "mode":
        directory.mkdir()
        directory.chmod(0o755)
    else:
        directory = tmp_path / "missing" / "cache"
    assert str(directory) in refusal(CacheShell, sanitized_build, directory)
    assert not (tmp_path / "missing").exists()


def make_unit(build: Path, directory: Path) -> None:
    with CacheShell(build, directory) as shell:
        shell.open(0, SIZE, UNIT)
        shell.line("put 0 0")


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.data
@pytest.mark.parametrize(
    "damage",
    ["no data", "no bits", "data of another", "short", "header", "key", "fifo"],
)
def test_discards_what_is_damaged(
    sanitized_build: Path, tmp_path: Path, damage: str
) -> None:
    make_unit(sanitized_build, tmp_path)
    data, bits = data_file(tmp_path), bits_file(tmp_path)
    if damage == "no data":
        data.unlink()
    elif damage == "no bits":
        bits.unlink()
    elif damage == "data of another":
        size = data.stat().st_size
        data.unlink()
        data.touch()
        os.truncate(data, size)
    elif damage == "short":
        os.truncate(bits, bits.stat().st_size - 64)
    elif damage == "header":
        overwrite(bits, 20, b"\1")
    elif damage == "key":
        data.rename(data_file(tmp_path, 1))
        bits.rename(bits_file(tmp_path, 1))
    else:
        bits.unlink()
        os.mkfifo(bits)
    index = 1 if damage == "key" else 0
    with CacheShell(sanitized_build, tmp_path) as shell:
        assert shell.open(index, SIZE, UNIT) == "ok"
        assert shell.line("read", index, 0, 0) == "miss"
        assert shell.line("put", index, 0) == "ok"
        assert shell.line("read", index, 0, 0) == "ok"


@pytest.mark.data
@pytest.mark.parametrize("ending", ["data", "bits"])
def test_does_not_believe_what_was_cut(
    sanitized_build: Path, tmp_path: Path, ending: str
) -> None:
    """While it is in use: what is put behind the end would make a hole, of zeroes, of
    what is missing; and mapped bits that are not there would be SIGBUS.
    """
    with CacheShell(sanitized_build, tmp_path) as shell:
        shell.open(0, SIZE, UNIT)
        for unit in (0, 3):
            assert shell.line("put 0", unit) == "ok"
        shell.line("sync")
        os.truncate(tmp_path / f"{key_of(0)}.{ending}", 0)
        if ending == "bits":
            assert shell.line("read 0 3 3") == "miss"
        assert shell.line("put 0 10") == f"error {errno.EIO}"
        assert shell.line("check 0") == "m" * 11
        shell.line("sync")
    with CacheShell(sanitized_build, tmp_path) as shell:
        assert shell.open(0, SIZE, UNIT) == "ok"
        assert shell.line("check 0") == "m" * 11
        assert shell.line("put 0 3") == "ok"
        assert shell.line("read 0 3 3") == "ok"


def spoil(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << offset % 8]))


@pytest.mark.data
@pytest.mark.parametrize("what", ["data", "sums", "hole"])
def test_rot_is_not_read(sanitized_build: Path, tmp_path: Path, what: str) -> None:
    """By any process, and whether the content is open or not."""
    data = data_file(tmp_path)

    def rot(unit: int) -> None:
        if what == "hole":
            punch_hole(data, unit * UNIT, 4096)
        elif what == "data":
            spoil(data, unit * UNIT + 4095)
        else:
            spoil(data, SUMS_AT + unit * UNIT // 4096 * 4)

    with (
        CacheShell(sanitized_build, tmp_path) as shell,
        CacheShell(sanitized_build, tmp_path) as other,
    ):
        for each in (shell, other):
            each.open(0, SIZE, UNIT)
        for unit in range(11):
            assert shell.line("put 0", unit) == "ok"
        assert shell.line("sync") == "ok"
        for unit in (1, 2, 7):
            rot(unit)
        for each in (shell, other):
            assert each.line("check 0") == "orroooorooo"
        assert shell.line("read 0 0 1") == "rotten"
        # A fetch of it drops it, and puts it anew.
        assert shell.line("drop 0 1") == shell.line("put 0 1") == "ok"
        assert shell.line("sync") == "ok"
        assert other.line("check 0") == "oo" + "roooorooo"
    rot(3)
    with CacheShell(sanitized_build, tmp_path) as shell:
        shell.open(0, SIZE, UNIT)
        # Some holes are found when it is opened.
        assert shell.line("check 0").replace("m", "r") == "oorrooorooo"


def test_leaves_what_is_newer(sanitized_build: Path, tmp_path: Path) -> None:
    make_unit(sanitized_build, tmp_path)
    overwrite(bits_file(tmp_path), 8, b"\3")
    before = bits_file(tmp_path).read_bytes()
    with CacheShell(sanitized_build, tmp_path) as shell:
        assert shell.open(0, SIZE, UNIT) == f"error {errno.EPROTONOSUPPORT}"
    assert bits_file(tmp_path).read_bytes() == before


@pytest.mark.data
def test_many_at_once(sanitized_build: Path, tmp_path: Path) -> None:
    """Readers, putters, droppers and evictors in three processes: no wrong byte."""
    shells = [
        CacheShell(sanitized_build, tmp_path, max_bytes=6_000_000) for _ in range(3)
    ]
    try:
        for shell in shells:
            assert shell.open(0, 1_000_000, UNIT) == "ok"
            assert shell.open(1, 20_000_001, 4096) == "ok"
        for shell in shells:
            shell.send("stress 4 4")
        for shell in shells:
            reads, hits, changed, puts, wrong = map(int, shell.line().split())
            assert wrong == 0
            assert hits and puts and reads >= hits + changed
        for shell in shells:
            stats = shell.stats()
            assert stats["failed"] == 0
            assert stats["evicted_units"]
            shell.close()
    finally:
        for shell in shells:
            shell.kill()


@pytest.mark.data
def test_killed_at_any_moment(sanitized_build: Path, tmp_path: Path) -> None:
    """Processes that die in the midst leave neither a lock nor a wrong bit."""
    with CacheShell(sanitized_build, tmp_path, max_bytes=3_000_000) as survivor:
        survivor.open(0, 5_000_000, 4096)
        for number in range(6):
            victim = CacheShell(sanitized_build, tmp_path, max_bytes=3_000_000)
            with victim:
                victim.open(0, 5_000_000, 4096)
                victim.send("stress 10 4")
                survivor.send("stress 1 2")
                time.sleep(0.1 + number * 0.13)
                victim.kill()
            assert survivor.line().split()[-1] == "0"
    with CacheShell(sanitized_build, tmp_path) as shell:
        shell.open(0, 5_000_000, 4096)
        answers = [
            shell.line("read 0", unit, unit) for unit in range(5_000_000 // 4096)
        ]
    assert set(answers) == {"ok", "miss"}
