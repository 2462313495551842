"""What the benchmarks of fetching make of what they have measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from btrfs_ublk.base.process import run
from btrfs_ublk.bench import fetching
from btrfs_ublk.bench.bed import CURL, OPENSSL, PEERS
from btrfs_ublk.bench.origin import NGINX
from btrfs_ublk.units import GIB


def test_ratios_within_turns() -> None:
    """The second turn was slow for all; a ratio is of medians of pairs."""
    results: list[dict[str, Any]] = []
    for turn, factor in enumerate((1.0, 20.0, 1.2), start=1):
        about = {"unit": 4096, "turn": turn, "load": 0.5}
        mine = {"p50_us": 60.0 * factor, "iops": 100.0}
        bare = {"p50_us": 40.0 * factor, "iops": 100.0}
        results += [{"what": "random", "subject": "ours"} | about | mine]
        results += [{"what": "random", "subject": "bare GET"} | about | bare]
    for subject, seconds in (("ours", 2.0), ("curl | openssl dgst", 1.0)):
        about = {"what": "sequential", "subject": subject, "unit": 1 << 18, "turn": 1}
        spent = {"seconds": seconds, "cpu_s": 0.25, "requests": 3, "load": 0.5}
        results.append(about | spent)
    given = {"size_bytes": GIB, "runtime_s": 1.0, "round_trip_ms": 20, "mbit": 0}
    random, sequential = fetching.tables({"results": results, "parameters": given})
    assert random.rows == [
        ("bare GET", "4 KiB", "3", "48.0", "1.00 (1.00-1.00)", "0.5"),
        ("ours", "4 KiB", "3", "72.0", "1.50 (1.50-1.50)", "0.5"),
    ]
    assert sequential.rows == [
        ("curl | openssl dgst", "256 KiB", "1", "1,024", "0.25", "3", "1.00", "0.5"),
        ("ours", "256 KiB", "1", "512", "0.25", "3", "0.50", "0.5"),
    ]


@pytest.mark.device
def test_all_that_needs_no_delay(tmp_path: Path) -> None:
    """Each kind of reading that this machine can do is measured once."""
    for capability in (NGINX, CURL, OPENSSL, *(x for y in PEERS.values() for x in y)):
        if capability.probe():
            pytest.skip(f"{capability.name}: {capability.probe()}")
    words = [sys.executable, "-m", "btrfs_ublk.bench.fetching", "--json"]
    words += ["--size=8M", "--runtime=0.2", "--repeats=1", f"--disk={tmp_path}"]
    chosen = ("random", "warm", "sequential", "readers")
    words += [f"--what={what}" for what in chosen]
    document = json.loads(run(words, timeout_s=240).stdout)
    document["results"].sort(key=lambda result: chosen.index(result["what"]))
    for name, table in zip(chosen, fetching.tables(document)):
        assert table.title == fetching.KINDS[name]["title"]
        assert len(table.rows) == len(fetching.cases(name, 0.2))
