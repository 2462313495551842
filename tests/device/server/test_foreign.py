"""ublk devices of other projects' programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.needs import Need, inapplicable

from btrfs_ublk.base.capabilities import UBLK
from btrfs_ublk.base.gc import collect
from btrfs_ublk.bench.peers.others import RUBLK
from btrfs_ublk.bench.resources.foreign import foreign_device
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import list_ublk_devices

pytestmark = pytest.mark.ublk


def test_gc_removes_the_device_of_a_killed_process(need: Need) -> None:
    need(UBLK)
    if RUBLK.probe() is not None:
        inapplicable("rublk is not installed (cargo install rublk)")
    code = f"""
import time
from btrfs_ublk.bench.resources.foreign import foreign_device
argv = [{RUBLK.path()!r}, "add", "null", "--foreground"]
with foreign_device(argv, delete=[argv[0], "del", "-n"]) as device:
    print(device.path, flush=True)
    time.sleep(60)
"""
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        path = victim.stdout.readline().strip()
        victim.kill()
    assert path and list_ublk_devices() != []
    assert collect().is_clean
    assert not Path(path).exists() and list_ublk_devices() == []


def test_a_program_that_gives_no_device() -> None:
    with pytest.raises(BtrfsUblkError, match="status 3 before its device.*\n.*oh"):
        argv = ["sh", "-c", "echo oh >&2; exit 3"]
        with foreign_device(argv, delete=["false"]):
            pass
