"""Who used the CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from btrfs_ublk.bench.cpu import (
    Process,
    RawSnapshot,
    Snapshot,
    Usage,
    children_of,
)

IDLE = dict.fromkeys(
    ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"), 100.0
)


def process(own_s: float, *, kernel: bool = False, children_s: float = 0.0) -> Process:
    return Process(1, kernel, own_s, children_s)


def test_known_numbers() -> None:
    before = Snapshot(
        time_s=50.0,
        cpu_count=4,
        cpus=IDLE,
        processes={
            1: process(10.0, children_s=5.0),
            2: process(1.0, kernel=True),
            10: process(2.0),
            11: process(3.0),
            20: process(7.0),
        },
    )
    after = Snapshot(
        time_s=60.0,
        cpu_count=4,
        cpus=IDLE | {"idle": 110.0, "iowait": 104.0, "steal": 101.0, "softirq": 102.0},
        processes={
            # 20 has ended after 1 s more; 30 came and went, 2 s.
            1: process(10.0, children_s=5.0 + 8.0 + 2.0),
            2: process(2.0, kernel=True),
            10: process(12.0),
            11: process(13.5),
            40: process(0.5),
        },
    )
    usage = Usage(before, after, {"fio": [10, 99], "server": [11]})
    assert usage.record() == {
        "total": pytest.approx(4 - 1.5),
        "fio": pytest.approx(1.0),
        "server": pytest.approx(1.05),
        "rest": pytest.approx(0.45),
        "kernel_threads": pytest.approx(0.1),
        "other": pytest.approx(0.35),
        "interrupts": pytest.approx(0.2),
        "steal": pytest.approx(0.1),
        "accounted": pytest.approx(1.0),
    }


SPIN = """
import sys
print(flush=True)
while True:
    pass
"""


@pytest.mark.timing
def test_a_busy_process_is_told_from_the_others() -> None:
    """Whatever else runs: its own time, and a total that the parts add up to."""
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            assert busy.pid in children_of(os.getpid())
            before = RawSnapshot.take()
            time.sleep(2.0)
            after = RawSnapshot.take()
        finally:
            busy.kill()
    usage = Usage(before.parse(), after.parse(), {"busy": [busy.pid]})
    record = usage.record()
    assert 0.02 < record["busy"] <= 1.02
    assert record["busy"] <= record["total"] <= os.cpu_count() * 1.01  # type: ignore
    assert record["total"] == pytest.approx(record["busy"] + record["rest"])
    # Two ways of counting, of which one counts ticks; and not everybody is waited for.
    assert 0.7 < record["accounted"] < 1.15
