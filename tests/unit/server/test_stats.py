"""What servers count and time: histograms, the engine's statistics, whole servers."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.sanitized_build import SANITIZER_ENVIRONMENT

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server import (
    Latency,
    ServerStats,
)

#: Where buckets begin and end, and beyond.
LOWEST_NS, HIGHEST_NS = 64, 2**37
PERCENTS = (50.0, 90.0, 99.0, 99.9)
TIMEOUT_S = 30.0


def histogram(
    build: Path, durations: list[tuple[int, int]]
) -> tuple[list[int], Latency]:
    """What the server's histogram says of (nanoseconds, how many of them): count and
    percentiles, and the whole of it.
    """
    done = subprocess.run(
        [build / "csrc/tests/histogram-shell"],
        input="".join(f"{ns} {count}\n" for ns, count in durations),
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    summary, *lines = done.stdout.splitlines()
    count, sum_ns, max_ns, *percentiles = map(int, summary.split())
    buckets = tuple((int(b), int(n)) for b, n in map(str.split, lines))
    return [count, *percentiles], Latency(sum_ns, max_ns, buckets)


class TestHistogram:
    @settings(max_examples=40)
    @given(
        st.lists(
            st.tuples(
                st.one_of(st.integers(0, 2**38), st.integers(0, 5000)),
                st.integers(1, 1000),
            ),
            min_size=1,
            max_size=50,
        )
    )
    @example([(0, 1)])
    @example([(2**63, 1), (1, 1)])
    @example([(100_000_000_000, 1), (100, 999)])
    def test_percentiles_are_the_true_ones_to_an_eighth(
        self, sanitized_build: Path, durations: list[tuple[int, int]]
    ) -> None:
        (count, *percentiles), latency = histogram(sanitized_build, durations)
        assert count == latency.count == sum(n for _, n in durations)
        assert latency.max_ns == max(ns for ns, _ in durations)
        assert latency.sum_ns == sum(ns * n for ns, n in durations)
        assert latency.mean_ns == latency.sum_ns / count
        for percent, found in zip(PERCENTS, percentiles, strict=True):
            rank = math.ceil(round(percent * count / 100, 6))
            true = exact(durations, rank)
            assert true <= found <= max(true * 1.125, LOWEST_NS) or true > HIGHEST_NS
            assert latency.percentile_ns(percent) == found
        assert latency.percentile_ns(100) == latency.max_ns


def exact(durations: list[tuple[int, int]], rank: int) -> int:
    below = 0
    for ns, count in sorted(durations):
        below += count
        if below >= rank:
            return ns
    raise AssertionError("no such rank")


@pytest.mark.parametrize(
    "stats", [{}, {"reads": 1}, {"kinds": 3}, {"kinds": {}, "queues": [{}]}]
)
def test_what_is_no_statistics_is_refused(stats: dict[str, Any]) -> None:
    with pytest.raises(BtrfsUblkError, match="not understood"):
        ServerStats.parse(stats)
