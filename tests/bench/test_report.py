"""The benchmarks' pure parts: quantiles, documents, tables; and what they print."""

import json
import platform
import random
import re
import socket
from pathlib import Path

import pytest
from support.paths import TESTS

from btrfs_ublk.bench.environment import environment
from btrfs_ublk.bench.stats import bootstrap_interval


class TestBootstrapInterval:
    def test_of_a_median(self) -> None:
        chances = random.Random(5)
        values = [chances.gauss(100, 10) for _ in range(400)]
        low, high = bootstrap_interval(values)
        # The median's standard error is 1.25 * 10 / 20.
        assert 98 < low < 100 < high < 102
        assert high - low == pytest.approx(2 * 1.96 * 0.627, rel=0.3)
        assert bootstrap_interval(values) == (low, high)
        narrow = bootstrap_interval(values, confidence=0.5)
        assert low < narrow[0] < narrow[1] < high

    def test_of_a_ratio_it_covers_the_true_one_that_often(self) -> None:
        chances = random.Random(7)
        covered = 0
        for _ in range(200):
            values = [chances.gauss(150, 15) for _ in range(20)]
            baseline = [chances.gauss(100, 10) for _ in range(20)]
            low, high = bootstrap_interval(values, baseline, resamples=200)
            covered += low <= 1.5 <= high
        assert 180 <= covered <= 199

    def test_pairs_leave_out_what_slowed_both_down(self) -> None:
        chances = random.Random(9)
        baseline = [100 * chances.uniform(0.2, 1) for _ in range(20)]
        values = [1.5 * each for each in baseline]
        assert bootstrap_interval(values, baseline, paired=True) == pytest.approx(
            (1.5, 1.5)
        )
        low, high = bootstrap_interval(values, baseline)
        assert low < 1.3 and high > 1.7


class TestEnvironment:
    def test_it_names_neither_host_nor_paths(self, tmp_path: Path) -> None:
        record = environment(tmp_path)
        assert record["kernel"] == platform.release() and record["cpus"] >= 1
        assert len(record["load"]) == 3
        assert 0 < record["file_system_free_bytes"] <= record["file_system_bytes"]
        text = json.dumps(record)
        assert str(tmp_path) not in text and str(TESTS) not in text
        # Not as a part of another word: hosts have names such as "vm".
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)

    about = {"comparison": "t", "run": "1", "workload": "w", "status": "ok"}
    measures = [{"name": "seconds", "better": "less", "digits": 1}]
    tested = {"title": "t", "peers": ["[one]"], "bars": [], "measures": measures}
