"""Processes that only use CPU time, as load beside a measurement."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from btrfs_ublk.base.process import spawn

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
