"""Keepers that a supervisor starts: replaced when they die, and never without one."""

import os
import signal
from pathlib import Path

from support.devices import TIMEOUT_S, kill

from btrfs_ublk.device.state import DeviceDirectory, KeeperRecord
from btrfs_ublk.supervision.keeper import Keeping


def test_one_that_dies_young_is_replaced_at_once(tmp_path: Path) -> None:
    """Else nothing holds the connection meanwhile, if the others are killed, too."""
    directory = DeviceDirectory(tmp_path)
    written: list[list[KeeperRecord]] = []
    keeping = Keeping(directory, [], [], written.append, None, None)
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        for _ in range(3):
            keeping.keep([fd])
            assert keeping.keeper is not None
            assert written[-1] == [keeping.keeper.record]
            kill(keeping.keeper.record.process, signal.SIGKILL)
            keeping.keeper.record.process.wait(timeout_s=TIMEOUT_S)
    finally:
        keeping.drop()
        os.close(fd)
