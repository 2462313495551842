"""Devices added and removed many times: what is counted, and that growth is seen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import device_cycles
import pytest
from click.testing import CliRunner
from cycle_tables import COUNTED
from device_cycles import command, counts, grown_caches, growth
from support.needs import Need

from btrfs_ublk.base.capabilities import FUSE, LOOP, UBLK
from btrfs_ublk.bench.report import tables_of
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server import BlockServer, Description, FrontEndName, ZeroSegment
from btrfs_ublk.units import MIB

ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])


class TestGrowth:
    BEFORE = dict.fromkeys(COUNTED, 0)

    def test_what_breathes_is_none(self) -> None:
        after = self.BEFORE | {"slab_bytes": 2 * MIB}
        assert growth(self.BEFORE, after, cycles=1) == {}
        assert growth(after, self.BEFORE, cycles=1) == {}

    @pytest.mark.parametrize("name", COUNTED)
    def test_each_is_named(self, name: str) -> None:
        after = self.BEFORE | {name: 4 * MIB}
        (text,) = growth(self.BEFORE, after, cycles=10).values()
        assert name in text and "4,194,304 in 10 cycles" in text

    def test_an_object_of_each_cycle_is_seen(self) -> None:
        after = self.BEFORE | {"slab_bytes": 10_000 * 512}
        assert growth(self.BEFORE, after, cycles=10_000).keys() == {"slab_bytes"}

    def test_caches_that_grew_most_come_first(self) -> None:
        before = {"a": 10, "b": 20, "c": 5}
        after = {"a": 11, "b": 50, "c": 5, "new": 7}
        assert list(grown_caches(before, after).items()) == [
            *(("b", 30), ("new", 7), ("a", 1))
        ]


@pytest.mark.device
@pytest.mark.fuse
def test_servers_and_files_are_counted(need: Need) -> None:
    need(FUSE, LOOP)
    before = counts()
    with BlockServer(ZEROES, front_end="fuse"), open(os.devnull):
        during = counts()
    assert during["servers"] >= before["servers"] + 1
    assert during["open_files"] > before["open_files"]


def document_of(front_end: FrontEndName, where: Path) -> dict[str, object]:
    output = where / "results.json"
    done = CliRunner().invoke(
        command,
        [
            *("--front-end", front_end, "--cycles", "20", "--at-once", "4"),
            *("--rounds", "2", "--parent", str(where), "-o", str(output)),
        ],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    document: dict[str, object] = json.loads(output.read_text())
    return document


@pytest.mark.timing  # counts what the whole machine has
def test_its_command(front_end: FrontEndName, sparse_path: Path) -> None:
    document = document_of(front_end, sparse_path)
    # The kernel's memory may grow for other reasons, so that there is a third one.
    cycles, rounds, *_ = tables_of(document)
    assert [row[0] for row in cycles.rows] == [str(n) for n in range(11, 21)]
    assert [row[0] for row in rounds.rows] == ["1", "2"]
    assert rounds.title == "4 devices at once"
    for column in (-3, -2, -1):  # open files, servers, devices
        assert len({row[column] for row in [*cycles.rows, *rounds.rows]}) == 1


def test_one_that_fails_takes_the_others_along(
    front_end: FrontEndName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it, and nothing is left."""
    failed: list[str] = []

    def check(server: BlockServer) -> None:
        failed.append(str(server.device))
        raise BtrfsUblkError("wrong data")

    monkeypatch.setattr(device_cycles, "_check", check)
    with pytest.raises(BtrfsUblkError, match="wrong data"):
        device_cycles.at_once(front_end, 4, devices=3)
    assert failed


@pytest.mark.ublk
def test_devices_that_exist_are_a_refusal(need: Need, sparse_path: Path) -> None:
    need(UBLK)
    with BlockServer(ZEROES):
        done = CliRunner().invoke(command, ["--parent", str(sparse_path)])
    assert "would be counted" in str(done.exception)


@pytest.mark.device
@pytest.mark.fuse
@pytest.mark.timing  # counts what the whole machine has
def test_volumes_up_and_down(need: Need, sparse_path: Path) -> None:
    need(FUSE, LOOP)
    output = sparse_path / "results.json"
    done = CliRunner().invoke(
        command,
        [
            *("--front-end", "fuse", "--volumes", "2", "--cycles", "20"),
            *("--stretch", "8", "--parent", str(sparse_path), "-o", str(output)),
        ],
    )
    document = json.loads(output.read_text())
    found = [each["cycles"] for each in document["results"]]
    assert found == [8, 16, 20], (done.output, done.exception)
    assert len(tables_of(document)[0].rows) == 3
    # The kernel's memory may grow for other reasons.
    grown = {name for each in document["results"] for name in each["growth"]}
    assert grown <= {"slab_bytes"} and (grown or done.exit_code == 0), done.output
