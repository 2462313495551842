"""The reader that proofs rest on: it must see a wrong byte, an error, a hang."""

import json
import os
import signal
import subprocess
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.needs import Need, inapplicable
from support.processes import freeze
from support.sanitized_build import SANITIZER_ENVIRONMENT

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.base.helpers import VERIFY_READS
from btrfs_ublk.server import BlockServer, Description, PatternSegment
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB, TIB

BASE = 3 * TIB + 8 * KIB
HOW = {"direct": ["direct", "64"], "mmap": ["mmap", "3"]}


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def helper(sanitized_build: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in SANITIZER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return str(sanitized_build / "csrc/tools" / VERIFY_READS)


@pytest.fixture
def pattern(sparse_path: Path) -> Path:
    """4 MiB in which each 8 bytes are their offset plus BASE."""
    path = sparse_path / "pattern"
    path.write_bytes(array("Q", range(BASE, BASE + 4 * MIB, 8)).tobytes())
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        inapplicable("the file system of the tests has no O_DIRECT (tmpfs: Linux 6.5)")
    return path


def arguments(
    how: str, path: str | Path, *, base: int = BASE, deadline_s: int = 30
) -> list[str | Path]:
    return [*HOW[how], str(base), "1", str(deadline_s), path]


def verify(
    helper: str, how: str, path: str | Path, *, status: int = 0
) -> dict[str, Any]:
    """Read for a second."""
    with driven(helper, *arguments(how, path)) as reader:
        time.sleep(1)
        tell(reader, "stop\n")
        while (report := hear(reader))["event"] != "report":
            assert report["event"] == "hung"
        assert reader.wait(60) == status
    return report


def test_right_bytes(helper: str, pattern: Path, how: str) -> None:
    report = verify(helper, how, pattern)
    assert report["reads"] > 50 and 0 < report["max_ns"] < 5e9
    assert (report["wrong_bytes"], report["errors"], report["hung"]) == (0, 0, 0)
    assert report["by_error"] == {}


def test_wrong_bytes(helper: str, pattern: Path, how: str) -> None:
    place = 2 * MIB + 5 * 8
    with pattern.open("r+b") as file:
        file.seek(place + 2)
        file.write(b"\xee\xee")
    report = verify(helper, how, pattern, status=1)
    assert report["wrong_bytes"] % 2 == 0 and report["wrong_bytes"] > 0
    assert (report["wrong_offset"], report["errors"]) == (place, 0)
    assert report["wrong_found"] == (BASE + place) & ~0xFFFF0000 | 0xEEEE0000


@pytest.mark.parametrize(("name", "error"), [("direct", "short"), ("mmap", "SIGBUS")])
def test_a_file_that_becomes_short(
    helper: str, pattern: Path, name: str, error: str
) -> None:
    with driven(helper, *arguments(name, pattern)) as reader:
        tell(reader, "mark\n")
        assert hear(reader)["event"] == "served"
        os.truncate(pattern, 3 * MIB + 3 * BLOCK_BYTES)
        time.sleep(1)
        tell(reader, "stop\n")
        report = hear(reader)
    assert report["reads"] > 50 and report["wrong_bytes"] == 0
    assert report["by_error"] == {error: report["errors"]} and report["errors"] > 0


@contextmanager
def driven(*argv: str | Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        try:
            yield reader
        finally:
            reader.kill()


def tell(reader: subprocess.Popen[str], line: str) -> None:
    assert reader.stdin is not None
    reader.stdin.write(line)
    reader.stdin.flush()


def hear(reader: subprocess.Popen[str]) -> dict[str, Any]:
    assert reader.stdout is not None
    event: dict[str, Any] = json.loads(reader.stdout.readline())
    return event


@pytest.mark.fuse
class TestDevice:
    """Errors and hangs as a real device has them."""

    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(FUSE, LOOP)

    def test_errors(self, helper: str, how: str) -> None:
        half = PatternSegment(offset=0, length=4 * MIB, base=BASE)
        description = Description.filled(8 * MIB, [half])
        with BlockServer(description, front_end="fuse") as server:
            report = verify(helper, how, server.device, status=1)
        name = {"direct": "EIO", "mmap": "SIGBUS"}[how]
        assert report["by_error"] == {name: report["errors"]} and report["errors"] > 0
        assert report["reads"] > 10 and report["wrong_bytes"] == 0

    def test_a_hang_and_its_end(self, helper: str, how: str) -> None:
        pattern = PatternSegment(offset=0, length=TIB)
        with (
            BlockServer(Description(TIB, [pattern]), front_end="fuse") as server,
            driven(
                helper, *arguments(how, server.device, base=0, deadline_s=1)
            ) as reader,
        ):
            tell(reader, "mark\n")
            assert hear(reader)["event"] == "served"
            freeze(server.pid)
            try:
                tell(reader, "mark\n")
                hung = hear(reader)
                assert hung["event"] == "hung" and hung["length"] >= BLOCK_BYTES
            finally:
                os.kill(server.pid, signal.SIGCONT)
            tell(reader, "stop\n")
            events = []
            while not events or events[-1]["event"] != "report":
                events.append(hear(reader))
            report = events[-1]
            assert report["hung"] >= 1 and report["errors"] == 0
            assert report["wrong_bytes"] == 0
            assert report["max_ns"] > 1e9
            assert reader.wait(60) == 1
