"""The benchmark of containers: one turn of each, of a small image."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from container_bed import NEEDS, OVERLAYFS
from container_images import SKOPEO
from container_speed import CALLERS, CALLS, SUBJECTS
from support.containers import NAME
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk.testing.registry import REGISTRY

pytestmark = pytest.mark.device

BALLAST_BYTES = 8 << 20


def measure(path: Path, *words: str | Path) -> Any:
    """Run a study with mounts of its own; return its document."""
    campaign = PROJECT / "tests/campaigns/container_speed.py"
    argv = [sys.executable, PROJECT / "scripts/isolate", sys.executable, campaign]
    argv += [*words, "--directory", path, "--repeats", "1", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_calls_take_turns(need: Need, sparse_path: Path) -> None:
    need(*NEEDS)
    document = measure(sparse_path, "calls")
    results = document["results"]
    assert {each["subject"] for each in results} == set(CALLERS)
    assert all(each[call] > 0 for each in results for call in CALLS)
    (table,) = document["tables"]
    assert [row[:2] for row in table["rows"]] == [
        [call, caller] for call in CALLS for caller in (OVERLAYFS, NAME)
    ]


def test_starts_fetch_what_they_read(need: Need, sparse_path: Path) -> None:
    need(*NEEDS, REGISTRY, SKOPEO)
    link = ("--image", "busybox", "--latency", "1", "--mbit", "1000")
    keep = sparse_path / "images"
    document = measure(sparse_path, "starts", *link, "--keep", keep)
    moved = {each["subject"]: each["bytes"] for each in document["results"]}
    assert list(SUBJECTS) == [row[1] for row in document["tables"][0]["rows"]]
    assert moved[OVERLAYFS] > BALLAST_BYTES > moved["sealed"]
    first = sparse_path / "first.json"
    first.write_text(json.dumps(document))
    both = measure(
        *(sparse_path, "starts", *link, "--keep", keep, "--everything"),
        *("--subject", OVERLAYFS, "--subject", "sealed, traced", "--more", first),
    )
    *before, overlayfs, sealed = sorted(both["results"], key=lambda x: int(x["turn"]))
    assert before == document["results"] and overlayfs["turn"] == sealed["turn"] == 2
    assert all(each["bytes"] > BALLAST_BYTES for each in (overlayfs, sealed))
    assert all(each["cpu_s"] > 0 for each in both["results"])
