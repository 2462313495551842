"""Processes that use the CPUs: there when asked for, and gone after."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from btrfs_ublk.bench import hogs as module
from btrfs_ublk.bench.hogs import _HOG, hogs


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
            deadline_s = time.monotonic() + 10
            while policies() != [policy] * 2:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
        deadline_s = time.monotonic() + 10
        while policies():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    with hogs(None):
        assert policies() == []
