"""The campaign of kills (campaigns/kills.py) in a short form, and what it counts."""

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kills import problems_of
from shadowed_writer import Held, Node
from support.paths import TESTS

from btrfs_ublk.bench.report import tables_of
from btrfs_ublk.server import FrontEndName

CAMPAIGN = TESTS / "campaigns" / "kills.py"
TIMEOUT_S = 600

pytestmark = [pytest.mark.data, pytest.mark.timeout(TIMEOUT_S + 60)]


@contextmanager
def campaign(
    front_end: FrontEndName, parent: Path, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    where = ["--front-end", front_end, "--parent", str(parent)]
    argv = [sys.executable, str(CAMPAIGN), *where, *arguments]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as it:
        try:
            yield it
        finally:
            it.send_signal(signal.SIGTERM)


@pytest.mark.device
@pytest.mark.fuse
def test_nothing_is_lost(sparse_path: Path) -> None:
    """With ublk it takes an emulated machine longer than a test may: by hand only."""
    results = sparse_path / "results.json"
    kinds = ["daemon, servers, keepers", "daemon + servers, again"]
    kinds += ["servers + keepers", "all three", "all get STOP", "daemon during up"]
    arguments = ["--rounds=6", "--seed=5", "--volumes=2", "-o", str(results)]
    arguments += [f"--kind={kind}" for kind in kinds]
    with campaign("fuse", sparse_path, *arguments) as running:
        _, said = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0, said
    document = json.loads(results.read_text())
    rounds = document["results"]
    assert [each["kind"] for each in rounds] == kinds
    for each, least in zip(rounds, [5, 6, 4, 5, 5, 1], strict=True):
        assert each["kills"] >= least
    # One has thousands of small files.
    assert rounds[2]["operations"] > 100
    assert all(each["reads"] for each in rounds)
    # A FUSE connection has ended then, and nothing can be read: but nothing is lost.
    assert "over" in rounds[3]
    (table,) = tables_of(document)
    assert [row[0] for row in table.rows] == [*kinds, "all"]


@pytest.mark.device
@pytest.mark.fuse
def test_it_is_interrupted(sparse_path: Path) -> None:
    """Nothing is left: the fixtures see to that."""
    with campaign("fuse", sparse_path) as running:
        assert running.stderr is not None
        assert "round 1" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        running.stderr.read()
    assert running.returncode == 130


def test_a_page_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    """The writer, which knows what must be there, must survive what is over."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDWR)
    held = Held(Node(0o644, bytearray(8192)), fd, mmap.mmap(fd, 0))
    held.write(4094, b"data")
    assert path.read_bytes()[4094:4098] == b"data"
    os.truncate(path, 4096)
    for offset in (4094, 4096):
        with pytest.raises(OSError):
            held.write(offset, b"data")
    held.close()


def test_what_counts_as_a_problem() -> None:
    fine = {"recovery_s": 0.5, "check": ""}
    assert list(problems_of(fine)) == []
    lost = {"recovered": [], "flushed": ["a: it is missing"], "up again": []}
    for problem in (
        {"read_errors": 1},
        {"wrong_bytes": 4096},
        {"write_errors": ["append: Input/output error"]},
        {"different": lost},
        {"check": "bad tree block"},
    ):
        assert len(list(problems_of(fine | problem))) == 1
    assert list(problems_of({"over": True, "read_errors": 1})) == []
    assert list(problems_of({"over": True, "different": lost})) != []
