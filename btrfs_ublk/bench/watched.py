"""fio, and who uses the CPUs while it measures."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from btrfs_ublk.bench.cpu import RawSnapshot, Usage
from btrfs_ublk.bench.fio import wait_for_jobs
from btrfs_ublk.errors import CommandError
from btrfs_ublk.process import Argument, Child, describe_exit, spawn

_END_TIMEOUT_S = 120.0
#: Before it ends: both looks are to be taken while it reads.
_TAIL_SHARE, _LEAST_TAIL_S = 0.05, 0.1


def run_watched(
    argv: Sequence[Argument],
    *,
    jobs: int,
    ramp_s: float,
    runtime_s: float,
    server_pids: Iterable[int],
    with_switches: bool = False,
    meanwhile: AbstractContextManager[object] | None = None,
) -> Usage | None:
    """Run fio (random_read_argv()) to its end. None when it has ended too soon to tell,
    as it does where it starts slowly.

    ``with_switches``: count the servers' context switches as well. ``meanwhile`` is
    entered for the time that is looked at. Raises CommandError when fio fails.
    """
    servers = set(server_pids)
    counted = servers if with_switches else set()
    with spawn(argv) as fio:
        readers = wait_for_jobs(fio, jobs)
        began_s = time.monotonic()
        fio.wait(ramp_s)
        with meanwhile or nullcontext():
            before = RawSnapshot.take(counted)
            tail_s = max(_LEAST_TAIL_S, _TAIL_SHARE * runtime_s)
            end_s = began_s + ramp_s + runtime_s - tail_s
            fio.wait(max(0.0, end_s - time.monotonic()))
            after = RawSnapshot.take(counted)
        was_reading = fio.wait(0) is None and bool(readers)
        _finish(fio, timeout_s=_END_TIMEOUT_S + runtime_s)
    if not was_reading:
        return None
    parts = {"fio": {fio.pid, *readers}, "server": servers}
    return Usage(before.parse(), after.parse(), parts)


def _finish(fio: Child, *, timeout_s: float) -> None:
    if fio.wait(timeout_s) is None:
        raise CommandError(fio.failure("does not end"))
    if fio.returncode:
        raise CommandError(fio.failure(describe_exit(fio.returncode)))
