"""Keepers that a supervisor starts: replaced when they die, and never without one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.devices import TIMEOUT_S, kill

from btrfs_ublk.device.state import DeviceDirectory, KeeperRecord
from btrfs_ublk.kernel.uevents import wait_until
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


def test_one_that_cannot_be_started_delays_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for other descriptors: the one before goes on, and the next succeeds."""
    keeping = Keeping(DeviceDirectory(tmp_path), [], [], lambda _: None, None, None)
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    try:
        keeping.keep(fds[:1])
        with monkeypatch.context() as patch:
            patch.setattr(
                "btrfs_ublk.supervision.keeper.helper_path", lambda _: "/none"
            )
            keeping.keep(fds)
        keeping.keep(fds)
        assert keeping.keeper is not None and keeping.keeper.record.fds == fds
        kill(keeping.keeper.record.process, signal.SIGKILL)
        keeping.keeper.record.process.wait(timeout_s=TIMEOUT_S)

        def is_kept() -> bool:
            keeping.keep(fds)
            return keeping.keeper is not None and not keeping.keeper.has_ended()

        wait_until(is_kept, timeout_s=TIMEOUT_S, what="no keeper")
    finally:
        keeping.drop()
        for fd in fds:
            os.close(fd)
