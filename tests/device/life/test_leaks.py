"""Interrupted at any moment, a process leaves nothing; killed, nothing after gc."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.children import stack
from support.needs import Need, share_of
from support.system_state import SystemState

import btrfs_ublk
from btrfs_ublk.base.capabilities import Helper
from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.helpers import MKSEED
from btrfs_ublk.base.jsonfile import RecordFormat
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.signals import interruptible
from btrfs_ublk.base.undo import undoing
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import loop_device, mounted, tempdir
from btrfs_ublk.seed import make_seed
from btrfs_ublk.volume.kept_ledger import KeptLedger, collect_kept
from btrfs_ublk.volume.temporary import virtual_file_of

STACK = Path(stack.__file__)
PACKAGE = str(Path(btrfs_ublk.__file__).parent)
SEED = 20261120
RUNS_PER_SIGNAL = share_of(8, least_percent=25)
INTERRUPTED_LINES = share_of(40, least_percent=20)


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(Helper(MKSEED))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_at_a_random_moment(
    sparse_path: Path,
    state_of_system: Callable[[], SystemState],
    signum: signal.Signals,
) -> None:
    """A process that builds and takes down a whole stack without end is interrupted."""
    moments = random.Random(SEED + signum)
    before = state_of_system()
    for run_number in range(RUNS_PER_SIGNAL):
        with subprocess.Popen(
            [sys.executable, str(STACK), str(sparse_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.readline()
            time.sleep(moments.uniform(0, 0.4))
            for _ in range(moments.choice([1, 1, 2])):  # an impatient user
                process.send_signal(signum)
                time.sleep(moments.uniform(0, 0.02))
            _, talk = process.communicate(timeout=60)
        expected = -signum if signum == signal.SIGKILL else 128 + signum
        assert process.returncode == expected, talk
        if signum == signal.SIGKILL:
            ledgers = collect().ledgers
            left = [o for ledger in ledgers for o in ledger.outcomes if o.reason]
            assert left == []
        assert state_of_system() == before, f"run {run_number}: {talk}"


class _InterruptAtLine:
    """A trace function that sends a signal at the Nth line of the package."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.lines = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        name = frame.f_code.co_filename
        # In contextlib too: between a resource's making and its registration.
        if not name.startswith(PACKAGE) and not name.endswith("/contextlib.py"):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                self.where = f"{name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGTERM)
        return self


def traced(trace: _InterruptAtLine, body: Callable[[], None]) -> None:
    sys.settrace(trace)
    try:
        body()
    finally:
        sys.settrace(None)


def test_a_signal_at_any_line(
    sparse_path: Path, state_of_system: Callable[[], SystemState]
) -> None:
    """The same, at lines spread over one whole cycle instead of at moments."""
    count = _InterruptAtLine(None)
    traced(count, lambda: stack.cycle(sparse_path))
    assert count.lines > 1000
    before = state_of_system()
    lines = random.Random(SEED).sample(range(1, count.lines), INTERRUPTED_LINES)
    for number in sorted(lines):
        trace = _InterruptAtLine(number)
        interrupted = False
        try:
            with interruptible():
                traced(trace, lambda: stack.cycle(sparse_path))
        except KeyboardInterrupt:
            interrupted = True
        assert interrupted or not trace.where
        # As at the process's exit: for signals just before the first line of a cleanup.
        assert [o for o in process_ledger().sweep() if o.reason] == []
        assert state_of_system() == before, f"interrupted at {trace.where}"


def test_a_signal_while_the_virtual_file_is_opened(sparse_path: Path) -> None:
    """At each of its lines: an open file would keep the mount busy."""
    with tempdir(parent=sparse_path) as directory:
        seed = make_seed(directory / "seed.img", virtual_data_size=1 << 30)
        target = directory / "mnt"
        target.mkdir()
        with (
            loop_device(seed.path, read_only=True) as device,
            mounted(device.path, target, read_only=True),
        ):

            def reach() -> None:
                with virtual_file_of(seed, target):
                    pass

            count = _InterruptAtLine(None)
            traced(count, reach)
            before = os.listdir("/proc/self/fd")
            for number in range(1, count.lines + 1):
                trace = _InterruptAtLine(number)
                with suppress(KeyboardInterrupt), interruptible():
                    traced(trace, reach)
                assert trace.where
                assert os.listdir("/proc/self/fd") == before, trace.where


def test_a_signal_while_a_kept_ledger_is_made(tmp_path: Path) -> None:
    """At each of its lines: whoever takes the volume down then removes it."""

    def make() -> None:
        ledger = KeptLedger(tmp_path)
        try:
            pass
        finally:
            ledger.close()

    count = _InterruptAtLine(None)
    traced(count, make)
    for number in range(1, count.lines + 1):
        trace = _InterruptAtLine(number)
        try:
            with interruptible():
                traced(trace, make)
        except KeyboardInterrupt:
            collect_kept(tmp_path)
        assert trace.where
        assert os.listdir(tmp_path) == [], trace.where


def test_a_signal_while_a_record_is_written(tmp_path: Path) -> None:
    """At each of its lines, it is there as before or as after, and nothing else is."""
    path = tmp_path / "record"

    def write(text: str = "after") -> None:
        RecordFormat(1, BtrfsUblkError, str, synced=True).replace(path, text)

    count = _InterruptAtLine(None)
    traced(count, write)
    for number in range(1, count.lines + 1):
        write("before")
        trace = _InterruptAtLine(number)
        with suppress(KeyboardInterrupt), interruptible():
            traced(trace, write)
        assert trace.where
        assert path.read_text() in ("before", "after"), trace.where
        assert os.listdir(tmp_path) == ["record"], trace.where


def test_what_an_error_has_left_open_is_closed_to_undo_a_step(tmp_path: Path) -> None:
    def work() -> None:
        file = (tmp_path / "file").open("w")
        raise OSError(f"{file} stays open")

    def undo() -> None:
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                assert os.readlink(f"/proc/self/fd/{fd}") != f"{tmp_path}/file"

    with pytest.raises(OSError) as caught, ExitStack() as on_failure:
        on_failure.push(undoing(undo))
        work()
    assert not hasattr(caught.value, "__notes__")
