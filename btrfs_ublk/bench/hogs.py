"""Processes that do nothing but use the CPUs, for reading beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from btrfs_ublk.process import spawn

#: How a hog runs.
HOGS: dict[str, Sequence[str]] = {"idle": ("chrt", "--idle", "0"), "normal": ()}
#: A session of its own, as whatever else runs on a machine has: with autogroups
#: (sched(7)) the scheduler treats it as one task. It ends with the one who waits.
_IN_A_SESSION = ("setsid", "--fork", "--wait", "setpriv", "--pdeathsig", "KILL")
_HOG = ("sh", "-c", "while :; do :; done")


@contextmanager
def hogs(kind: str | None) -> Iterator[None]:
    """One process for each CPU that does nothing but use it: with the scheduling policy
    SCHED_IDLE, or like all others. None: no such.
    """
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0) if kind else ():
            stack.enter_context(spawn([*_IN_A_SESSION, *HOGS[kind or ""], *_HOG]))
        yield
