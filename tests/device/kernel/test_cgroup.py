"""Control groups that count memory: what is counted, and that none is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.needs import Need

from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.process import run
from btrfs_ublk.bench.resources.cgroup import MEMORY_GROUPS, memory_group
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.units import MIB

#: Joins the group, then has so many MiB.
_USE = 'echo 0 >"$1" && exec head -c "$2" /dev/zero | tail -c "$2" >/dev/null'


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(MEMORY_GROUPS)


def test_the_peak_of_all_members() -> None:
    with memory_group() as group:
        path = group.path
        run(["sh", "-c", _USE, "sh", group.members, str(32 * MIB)], timeout_s=30)
        assert 32 * MIB <= group.peak_bytes() < 128 * MIB
    assert not path.exists()


def test_none_is_left() -> None:
    """Not after an error either, and not by gc, which knows it from the ledger."""
    with pytest.raises(BtrfsUblkError, match="on purpose"):
        with memory_group() as group:
            raise BtrfsUblkError("on purpose")
    assert not group.path.exists()
    assert "cgroup" not in {entry.kind for entry in process_ledger().entries()}
    with memory_group() as group:
        Path(group.path).rmdir()  # somebody else was quicker


_KILLED = """
import os, signal
from btrfs_ublk.bench.resources.cgroup import memory_group
with memory_group() as group:
    print(group.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_gc_removes_what_a_killed_run_left() -> None:
    done = run([sys.executable, "-c", _KILLED], timeout_s=60, ok_statuses=[-9])
    path = Path(done.stdout.strip())
    assert path.is_dir()
    outcomes = [x for ledger in collect().ledgers for x in ledger.outcomes]
    assert ("cgroup", "removed") in {(x.entry.kind, x.result) for x in outcomes}
    assert not path.exists()
