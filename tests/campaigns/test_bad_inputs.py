"""A few cases of the campaign of bad inputs (campaigns/bad_inputs.py)."""

from __future__ import annotations

import subprocess

import pytest
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk.base.capabilities import FUSE


@pytest.mark.device
@pytest.mark.fuse
def test_some_of_them(need: Need) -> None:
    need(FUSE)
    words = [
        "remove d",
        "--cache text",
        "map digest big -o small",
        "b device up x dir",
    ]
    argv = [PROJECT / "scripts/torture", "bad-inputs", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and ", 0 failures" in done.stderr, done
