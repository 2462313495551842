"""A share of the CPUs' time taken away, to make what runs meanwhile slower by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.process import spawn

#: How often: some fifty times in the shortest measurement.
_PERIOD_NS = 10_000_000
_READY_TIMEOUT_S = 20.0
#: Uses one CPU for so long of each period, before all others there. All do it at the
#: same moments, by the clock: else who is driven from one CPU went on on another.
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
    """All that does not run at a higher real-time priority than 2 stands still for that
    share of the time.

    Unlike a pause of one process it takes that from a busy machine as well: who pauses
    there only lets others run who would have run later. Raises CapabilityError where
    real-time priorities are not for us.
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
