"""What the benchmarks of fetching make of what they have measured."""

import json
import sys
from pathlib import Path

import pytest

from btrfs_ublk.base.process import run
from btrfs_ublk.bench import fetching
from btrfs_ublk.bench.bed import CURL, OPENSSL, PEERS
from btrfs_ublk.bench.origin import NGINX


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
