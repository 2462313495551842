"""Is a difference seen where there is one, and only there?"""

import json
import random
import signal
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.needs import Need

from btrfs_ublk.base.capabilities import Fio
from btrfs_ublk.base.process import spawn
from btrfs_ublk.bench.compare import FASTER, SAME, SLOWER, UNKNOWN, tables, verdicts
from btrfs_ublk.bench.report import OK
from btrfs_ublk.bench.stats import holm, sign_flip_probability

pytestmark = pytest.mark.thorough

_MAIN = "from btrfs_ublk.cli.main import main; main()"


def document(
    ours: dict[str, Sequence[float]], *, name: str = "iops", better: str = "more"
) -> dict[str, Any]:
    measure = {"name": name, "unit": "x", "better": better, "digits": 0}
    return {
        "parameters": {
            "comparisons": [
                {
                    **{"title": "t", "peers": list(ours), "workloads": ["w"]},
                    **{"bars": [], "measures": [measure]},
                }
            ]
        },
        "results": [
            {
                **{"comparison": "t", "run": "1", "peer": peer, "workload": "w"},
                **{"turn": turn, "status": OK, name: value},
            }
            for peer, values in ours.items()
            for turn, value in enumerate(values)
        ],
    }


def verdict_of(ours: dict[str, Sequence[float]], **more: str) -> str:
    (verdict,) = verdicts(document(ours, **more)).values()
    return verdict


def noisy(level: float, *, seed: int, spread: float = 0.05) -> list[float]:
    chances = random.Random(seed)
    return [level * chances.uniform(1 - spread, 1 + spread) for _ in range(12)]


class TestVerdicts:
    def test_noise_is_no_difference(self) -> None:
        """Of the same peer twice, at most one in twenty is told apart."""
        told = [
            verdict_of({"a": noisy(100, seed=n), "b": noisy(100, seed=-n - 1)})
            for n in range(60)
        ]
        assert told.count(SAME) >= 57

    def test_a_tenth_is_seen(self) -> None:
        a, b = noisy(100, seed=1), noisy(90, seed=2)
        assert verdict_of({"a": a, "b": b}) == SLOWER
        assert verdict_of({"b": b, "a": a}) == FASTER
        seconds = {"name": "seconds", "better": "less"}
        assert verdict_of({"a": a, "b": b}, **seconds) == FASTER

    def test_many_tests_are_corrected_for(self) -> None:
        """What is just sure enough by itself is not among forty: all turns agree, and
        more of them would tell.
        """
        ours: dict[str, Sequence[float]] = {"a": [100.0] * 6, "b": [80.0] * 6}
        assert verdict_of(ours) == SLOWER
        ours |= {f"c{n}": noisy(100, seed=n)[:6] for n in range(40)}
        assert verdicts(document(ours))["t", "w", "b"] == UNKNOWN

    def test_what_all_are_held_against(self) -> None:
        """The first that was measured; bars mean the first that was wanted."""
        ours = document({"a": [], "b": [100.0] * 6, "c": [50.0] * 6})
        ours["parameters"]["comparisons"][0]["bars"] = [
            {"peer": "c", "workload": "w", "ratio": 0.4, "of": "iops"}
        ]
        table, bars = tables(ours)
        assert [row[3] for row in table.rows] == ["1.00", "0.50"]
        assert table.rows[1][5] == SLOWER and bars.rows[0][-1] == "not measured"


class TestStatistics:
    def test_signs(self) -> None:
        assert sign_flip_probability([1.0] * 6) == 2 / 64
        assert sign_flip_probability([1.0, -1.0]) == 1.0
        assert sign_flip_probability([]) == 1.0
        chances = random.Random(5)
        some = [chances.gauss(0.3, 1) for _ in range(9)]
        ways = product((1, -1), repeat=9)
        sums = [abs(sum(s * x for s, x in zip(way, some))) for way in ways]
        share = sum(x >= abs(sum(some)) - 1e-9 for x in sums) / len(sums)
        assert sign_flip_probability(some) == pytest.approx(share)

    def test_holm(self) -> None:
        assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
        assert holm([0.5, 0.9]) == [1.0, 1.0]
        assert holm([]) == []


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
