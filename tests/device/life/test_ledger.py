"""The ledger: what is on disk at each moment, and who may touch it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.devices import abandon, enter


@pytest.mark.device  # it looks into the loop devices that there are
def test_gc_knows_all_kinds(tmp_path: Path) -> None:
    """Also those of benchmarks, which nobody else imports."""
    kinds = ["loop", "ublk-device", "zram"]
    for number, kind in enumerate(kinds):
        abandon(tmp_path, {**enter(number, "x", kind), "details": {}})
        code = (
            "import sys; from pathlib import Path\n"
            "from btrfs_ublk.base.gc import collect\n"
            "[ledger] = collect(Path(sys.argv[1])).ledgers\n"
            "[outcome] = ledger.outcomes; print(outcome.reason)"
        )
        argv = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.stdout == "None\n", done
