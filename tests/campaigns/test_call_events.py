"""Signals at system calls, by perf events (campaigns/call_events.py)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from call_events import CALL_EVENTS, CallEvent, tracepoints
from support.needs import Need

pytestmark = pytest.mark.device

MADE = 5


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(CALL_EVENTS)


def stopped(top: Path) -> int:
    """Return a process that goes on to make directories, after a child has done so."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSTOP)
            child = os.fork()
            for number in range(MADE):
                (top / f"{number} of {'it' if child else 'child'}").mkdir()
            if child:
                os.waitpid(child, 0)
        finally:
            os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    return pid


def ended(pid: int) -> int:
    os.kill(pid, signal.SIGCONT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_only_calls_of_the_process_count(tmp_path: Path) -> None:
    pid = stopped(tmp_path)
    with CallEvent(pid, tracepoints(("mkdir",))["mkdir"]) as event:
        assert ended(pid) == 0
        assert event.count == MADE and not event.sent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("sign", [1, -1], ids=["process", "group"])
def test_a_signal_comes_at_the_third_call(
    tmp_path: Path, number: signal.Signals, sign: int
) -> None:
    pid = stopped(tmp_path)
    event = tracepoints(("mkdir",))["mkdir"]
    with CallEvent(pid, event, at=3, to=sign * pid, number=number) as call:
        assert ended(pid) == -number
        assert call.sent
    assert len(list(tmp_path.glob("* of it"))) == 3


def test_a_call_that_is_not_reached_sends_nothing(tmp_path: Path) -> None:
    pid = stopped(tmp_path)
    event = tracepoints(("mkdir",))["mkdir"]
    with CallEvent(pid, event, at=MADE + 1, to=pid, number=signal.SIGKILL) as call:
        assert ended(pid) == 0
        assert not call.sent
