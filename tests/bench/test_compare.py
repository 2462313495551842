"""Comparing peers: order, ratios, bars; and real ones in turn."""

import json
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.needs import Need

from btrfs_ublk.base.capabilities import Fio
from btrfs_ublk.base.process import spawn
from btrfs_ublk.bench import commands, report
from btrfs_ublk.bench.commands.compare import Plan, blocks, command, compare
from btrfs_ublk.bench.compare import tables
from btrfs_ublk.bench.fio import parse_workload
from btrfs_ublk.bench.peer import Subject
from btrfs_ublk.bench.reading import measure
from btrfs_ublk.bench.report import OK, Document
from btrfs_ublk.bench.stats import ratio_of
from btrfs_ublk.bench.suite import Bar, Comparison
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.server import ZeroSegment
from btrfs_ublk.units import KIB, MIB

SIZE = 16 * MIB
_MAIN = "from btrfs_ublk.cli.main import main; main()"
PLAN = Plan(turns=20, runtime_s=0.5, size_bytes=SIZE, queues=None, depth=None, seed=1)


class TestWorkloads:
    def test_names(self) -> None:
        workload = parse_workload("randread-uring-d64-j2")
        assert (workload.engine, workload.depth, workload.jobs) == ("io_uring", 64, 2)
        assert workload.name == "randread-uring-d64-j2" and not workload.is_mapped
        assert parse_workload("seqread-1m").block_bytes == MIB
        mapped = parse_workload("randread-mmap-j3")
        assert (mapped.jobs, mapped.block_bytes) == (3, 4 * KIB) and mapped.is_mapped

    @pytest.mark.parametrize(
        "name",
        [
            *("", "randread", "randread-psync-d4", "randread-uring-d0", "write-psync"),
            *("randread-psync-j0", "randread-psync-j999", "randread-psync-x"),
        ],
    )
    def test_what_means_nothing_is_refused(self, name: str) -> None:
        with pytest.raises(UsageError):
            parse_workload(name)


class TestOrder:
    WORKLOADS = ["randread-psync", "seqread-1m"]

    def test_each_block_has_every_peer_once(self) -> None:
        order = list(blocks(["a", "b", "c"], self.WORKLOADS, PLAN))
        assert len(order) == 20 * 2 * 3
        seen = set()
        for start in range(0, len(order), 3):
            block = order[start : start + 3]
            assert len({(turn, workload) for turn, workload, _ in block}) == 1
            names = tuple(name for *_, name in block)
            assert sorted(names) == ["a", "b", "c"]
            seen.add(names)
        assert len(seen) == 6


def row(peer: str, turn: int, iops: float, **more: Any) -> dict[str, Any]:
    numbers = {"p50_us": 5.0, "p99_us": 50.0, "fio_us": 4.0, "server_us": 2.0}
    numbers |= {"kernel_us": 1.0, "cpu_us": 7.0, "cores": 0.5, "other_cores": 0.1}
    return {
        **{"comparison": "all", "run": "1", "peer": peer, "turn": turn, "status": "ok"},
        **{"workload": "randread-psync", "iops": iops},
        **numbers,
        **more,
    }


def document(results: Sequence[dict[str, Any]], bars: Sequence[Bar] = ()) -> Document:
    comparison = Comparison("all", ["a", "b", "c"], ["randread-psync"], bars)
    parameters = {"comparisons": [comparison.to_dict()]}
    return {"parameters": parameters, "results": list(results)}


class TestTables:
    def test_ratios_are_those_of_the_same_turns(self) -> None:
        """A turn in which all was slow says as much as one in which nothing was."""
        a = [row("a", 1, 100), row("a", 2, 10), row("a", 3, 50)]
        b = [row("b", 1, 50), row("b", 2, 5), row("b", 3, 25), row("b", 4, 999)]
        assert ratio_of(b, a, "iops")[:3] == pytest.approx((0.5, 0.5, 0.5))
        elsewhere = [result | {"run": "2"} for result in b]
        assert ratio_of(elsewhere, a, "iops")[0] != ratio_of(elsewhere, a, "iops")[0]

    def test_what_all_are_held_against(self) -> None:
        """The first that was measured; bars mean the first that was wanted."""
        results = [row(x, turn, y) for x, y in (("b", 9), ("c", 3)) for turn in (1, 2)]
        bars = [Bar("c", "randread-psync", 0.4)]
        table, held = tables(document(results, bars))
        assert [line[3] for line in table.rows] == ["1.00", "0.33"]
        assert held.rows[0][-1] == "not measured"


class TestMeasure:
    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(Fio("psync"))

    def measure(self, path: Path, subject: Subject) -> dict[str, Any]:
        return measure(
            subject,
            parse_workload("randread-psync"),
            size_bytes=SIZE,
            runtime_s=0.5,
            output=path / "fio.json",
            chances=random.Random(1),
        )

    def test_wrong_data_are_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"\1" * SIZE)
        wrong = ZeroSegment(offset=0, length=SIZE)
        with pytest.raises(BtrfsUblkError, match="byte 0 is 01, not 00"):
            self.measure(tmp_path, Subject(path, wrong, direct=False))


def test_what_was_measured_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        yield row("tmpfs", 1, 100.0)
        raise LeftoverError("a mount is left")

    monkeypatch.setattr(commands.compare, "compare", interrupted)
    done = invoke("tmpfs", "--workload=randread-psync", "--json", "--parent", tmp_path)
    assert isinstance(done.exception, LeftoverError)
    (result,) = json.loads(done.stdout)["results"]
    assert result["iops"] == 100.0


def invoke(*words: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, words)))


@pytest.mark.device
class TestCommand:
    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(Fio("psync"))

    def test_peers_in_turn(self, sparse_path: Path, tmp_path: Path) -> None:
        done = invoke(
            *("loop", "null_blk", "fuse", "--workload", "randread-psync"),
            *("--turns=2", "--runtime=0.5", "--size=16M", "--json"),
            *("--parent", sparse_path),
        )
        assert done.exit_code == 0, (done.output, done.exception)
        document = json.loads(done.stdout)
        statuses = {(x["peer"], x["status"]) for x in document["results"]}
        assert ("loop", "ok") in statuses and ("fuse", "ok") in statuses
        assert document["environment"]["cpu_flags"]
        path = tmp_path / "document.json"
        path.write_text(done.stdout)
        again = CliRunner().invoke(report.command, [str(path)])
        assert again.exit_code == 0 and "to that of loop" in again.stdout

    def test_one_with_wrong_data_is_left_out(self, sparse_path: Path) -> None:
        comparison = Comparison("x", ["tmpfs", "loop"], ["randread-psync"])
        plan = Plan(3, 0.5, SIZE, None, None, seed=1)
        results = compare(comparison, plan, parent=sparse_path)
        assert next(results)["status"] == "ok"
        (source,) = sparse_path.glob("*/disk-0")
        source.write_bytes(bytes(SIZE))
        rest = list(results)
        (failed,) = [x for x in rest if x["status"] == "failed"]
        assert failed["peer"] == "tmpfs" and "wrong data" in failed["reason"]
        others = [x for x in rest if x is not failed]
        assert {(x["peer"], x["status"]) for x in others} <= {("loop", "ok")}
        assert len(others) >= 2


@pytest.mark.device
def test_an_interrupt_leaves_what_was_measured(need: Need, sparse_path: Path) -> None:
    need(Fio("psync"))
    words = ["loop", "tmpfs", "--workload=randread-psync", "--turns=500"]
    words += ["--runtime=0.5", "--size=16M", "--json", f"--parent={sparse_path}"]
    output = sparse_path / "output"
    shell = ["sh", "-c", 'exec "$@" >"$0"', str(output)]
    argv = [*shell, sys.executable, "-c", _MAIN, "bench", "compare", *words]
    with spawn(argv, stop_timeout_s=60) as child:
        for _ in range(200):
            if "turn 2" in child.stderr_tail(50) or child.wait(0.2) is not None:
                break
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130, child.stderr_tail(20)
    found = json.loads(output.read_text())
    assert not found["complete"]
    assert {x["status"] for x in found["results"]} == {OK}
    assert 2 <= len(found["results"]) < 1000
    assert tables(found)
    # And of directories, loop devices, servers: nothing; see the fixtures.
    assert list(sparse_path.iterdir()) == [output]
