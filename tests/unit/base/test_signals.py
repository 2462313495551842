"""Signals become exceptions, and wait for the end of a deferred stretch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from btrfs_ublk.base.signals import (
    Interrupted,
    deferred,
    delivered,
    exit_status_of,
    interruptible,
)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(Interrupted) as caught, interruptible():
        os.kill(os.getpid(), signum)
    assert exit_status_of(caught.value) == 128 + signum
    assert signal.getsignal(signum) is before


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT])
def ignored_at_last(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that the test has ignored; handlers are as before then."""
    signums = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {signum: signal.getsignal(signum) for signum in signums}
    yield request.param
    now = signal.getsignal(request.param)
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert now == signal.SIG_IGN


def test_a_process_on_its_way_out_is_left_alone(
    ignored_at_last: signal.Signals,
) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible(exiting=True):
        os.kill(os.getpid(), ignored_at_last)
    os.kill(os.getpid(), ignored_at_last)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_deferred_stretch_is_not_cut(signum: signal.Signals) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interruptible():
        with deferred():
            os.kill(os.getpid(), signum)
            with deferred():
                os.kill(os.getpid(), signum)
            done.append("whole")
        done.append("never")
    assert done == ["whole"]


def test_a_wait_may_be_ended_but_not_what_cleans_up_after_it() -> None:
    done = []
    with pytest.raises(Interrupted), interruptible():
        with deferred():
            try:
                with delivered():
                    os.kill(os.getpid(), signal.SIGTERM)
                    done.append("never")
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                done.append("clean")
    assert done == ["clean"]


def test_the_first_error_is_kept() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        with deferred():
            os.kill(os.getpid(), signal.SIGINT)
            raise ValueError("first")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_second_ctrl_c_does_not_halve_the_cleanup() -> None:
    script = (
        "import os, signal\n"
        "from btrfs_ublk.base.signals import deferred, interruptible\n"
        "with interruptible():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally:\n"
        "        with deferred():\n"
        "            for _ in range(5): os.kill(os.getpid(), signal.SIGINT)\n"
        "            print('clean', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "clean\n"
    assert "KeyboardInterrupt" in done.stderr
