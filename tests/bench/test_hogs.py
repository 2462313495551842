"""Processes that use the CPUs, or take them away: there when asked for, gone after."""

from __future__ import annotations

import os
import sys

import psutil
import pytest
from support.needs import Need
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import ROOT
from btrfs_ublk.base.process import run
from btrfs_ublk.bench import cpu_load as module
from btrfs_ublk.bench.cpu_load import _HOG, hogs, stolen_time


def test_hogs_are_there_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def policies() -> list[int]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == [*_HOG, MARK]:
                found.append(os.sched_getscheduler(process.pid))
        return found

    MARK = f"hog-{os.getpid()}"
    monkeypatch.setattr(module, "_HOG", (*_HOG, MARK))
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    for kind, policy in (("idle", os.SCHED_IDLE), ("normal", os.SCHED_OTHER)):
        with hogs(kind):
            wait_until(lambda: policies() == [policy] * 2, policies)
        wait_until(lambda: not policies(), policies)
    with hogs(None):
        assert policies() == []


@pytest.mark.timing
def test_stolen_time_is_not_for_others(need: Need) -> None:
    """Of the same moments on all CPUs: who is driven from one finds none free."""
    need(ROOT)

    def used_s(seconds: float) -> float:
        """How long a process runs that wants to, by the clock, before all but those."""
        script = (
            "import os, sys, time\n"
            "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\n"
            "end = time.monotonic() + float(sys.argv[1])\n"
            "while time.monotonic() < end: pass\n"
            "print(time.process_time())"
        )
        argv = [sys.executable, "-c", script, str(seconds)]
        return float(run(argv, timeout_s=seconds + 20).stdout)

    with stolen_time(0.5):
        # A hypervisor that is late with one CPU's turn leaves a moment free there.
        shares = [used_s(0.5) / 0.5 for _ in range(5)]
    assert min(shares) < 0.8 and max(shares) > 0.3, shares
