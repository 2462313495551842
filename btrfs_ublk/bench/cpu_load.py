"""Processes that only use CPU time: as load beside a measurement, or to take a share of
the time from all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from btrfs_ublk.base.process import spawn
from btrfs_ublk.errors import CapabilityError

#: The command that sets a hog's priority.
HOGS: dict[str, Sequence[str]] = {"idle": ("chrt", "--idle", "0"), "normal": ()}
#: Each hog has its own session, as other programs have: with autogroups (sched(7)) the
#: scheduler treats a session as one task. It ends with the waiting process.
_IN_A_SESSION = ("setsid", "--fork", "--wait", "setpriv", "--pdeathsig", "KILL")
_HOG = ("sh", "-c", "while :; do :; done")


@contextmanager
def hogs(kind: str | None) -> Iterator[None]:
    """Run one busy process for each CPU: with the scheduling policy SCHED_IDLE, or a
    usual one. None: run no process.
    """
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0) if kind else ():
            stack.enter_context(spawn([*_IN_A_SESSION, *HOGS[kind or ""], *_HOG]))
        yield


#: The period: some fifty of them fit in the shortest measurement.
_PERIOD_NS = 10_000_000
_READY_TIMEOUT_S = 20.0
#: It uses one CPU for part of each period, before all others there. All do so at the
#: same moments by the clock: else a displaced task would continue on another CPU.
_THIEF = """
import os, sys
from time import monotonic_ns, sleep

cpu, period_ns, stolen_ns = map(int, sys.argv[1:])
os.sched_setaffinity(0, {cpu})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
print("ready", flush=True)
while True:
    sleep((period_ns - monotonic_ns() % period_ns) / 1e9)
    end_ns = monotonic_ns() + stolen_ns
    while monotonic_ns() < end_ns:
        pass
"""


@contextmanager
def stolen_time(share: float) -> Iterator[None]:
    """Stop all tasks without a real-time priority above 2 for that share of the time.

    Unlike pausing one process, this costs time on a busy machine, too: there, a pause
    only lets others run earlier that would have run later. Raises CapabilityError when
    real-time priorities are not permitted.
    """
    words = [sys.executable, "-c", _THIEF]
    times = [str(_PERIOD_NS), str(round(_PERIOD_NS * share))]
    with ExitStack() as stack:
        thieves = [
            stack.enter_context(spawn([*words, str(cpu), *times], pipe_stdout=True))
            for cpu in sorted(os.sched_getaffinity(0))
        ]
        for thief in thieves:
            assert thief.stdout is not None
            if not thief.stdout.readline():
                thief.wait(_READY_TIMEOUT_S)
                raise CapabilityError(
                    f"no time can be taken from others: {thief.stderr_tail(1)}",
                    hint="it takes root, or CAP_SYS_NICE",
                )
        yield
