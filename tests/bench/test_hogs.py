"""Processes that use the CPUs: there when asked for, gone after."""

from __future__ import annotations

import os

import psutil
import pytest
from support.waiting import wait_until

from btrfs_ublk.bench import cpu_load as module
from btrfs_ublk.bench.cpu_load import _HOG, hogs


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
