"""What servers count and time: histograms, the engine's statistics, whole servers."""

from __future__ import annotations

import errno
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.shells import BLOCK, describe, engine_shell

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


class TestEngine:
    def test_each_part_counts_for_its_kind(
        self, sanitized_build: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(bytes(2 * BLOCK))
        file = {"kind": "file", "length": 2 * BLOCK, "path": str(path)}
        description = describe(
            file | {"writable": True},
            {"kind": "memset", "length": BLOCK, "byte": 1},
            {"kind": "error", "length": BLOCK},
            read_only=False,
        )
        with engine_shell(sanitized_build, description) as shell:
            shell.request(f"read 0 {3 * BLOCK}")
            shell.request(f"read {BLOCK} {3 * BLOCK}")
            shell.request(f"write 0 {BLOCK} 7")
            shell.request(f"zero {BLOCK} {BLOCK}")
            shell.request("flush")
            assert shell.request(f"read {9 * BLOCK} {BLOCK}") == errno.EIO  # outside
            stats = ServerStats.parse(shell.stats())
        written, filled, failing = (
            stats.kinds[kind] for kind in ("file", "memset", "error")
        )
        assert (written.reads, written.read_bytes) == (2, 3 * BLOCK)
        assert (written.writes, written.write_zeroes, written.flushes) == (1, 1, 1)
        assert (filled.reads, failing.reads, failing.errors) == (2, 1, 1)
        # All of what may have to wait is timed.
        assert written.latency.reads.count == 2
        assert written.latency.writes.count == 2
        assert written.latency.flushes.count == 1
        assert 0 < written.latency.reads.max_ns < TIMEOUT_S * 1e9
        assert (stats.reads, stats.errors, stats.refused) == (5, 2, 1)
        assert [queue.in_flight for queue in stats.queues] == [0]
        assert [queue.max_in_flight for queue in stats.queues] == [1]


@pytest.mark.parametrize(
    "stats", [{}, {"reads": 1}, {"kinds": 3}, {"kinds": {}, "queues": [{}]}]
)
def test_what_is_no_statistics_is_refused(stats: dict[str, Any]) -> None:
    with pytest.raises(BtrfsUblkError, match="not understood"):
        ServerStats.parse(stats)
