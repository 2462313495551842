"""Interrupted at any line, a process leaves nothing."""

import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.needs import Need, share_of
from support.system_state import SystemState

import btrfs_ublk
from btrfs_ublk.base.capabilities import Helper
from btrfs_ublk.base.helpers import MKSEED
from btrfs_ublk.base.jsonfile import RecordFormat
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.signals import interruptible
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import clone_file, loop_device, tempdir
from btrfs_ublk.seed import make_seed
from btrfs_ublk.volume.sprout import sprout
from btrfs_ublk.volume.temporary import virtual_file_of

PACKAGE = str(Path(btrfs_ublk.__file__).parent)
SEED = 20261120
INTERRUPTED_LINES = share_of(40, least_percent=20)


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(Helper(MKSEED))


def cycle(parent: Path) -> None:
    """Build a whole stack, use it, and take it down."""
    with tempdir(parent=parent) as directory:
        target = directory / "mnt"
        target.mkdir()
        seed = make_seed(directory / "seed.img", virtual_data_size=1 << 30)
        with loop_device(seed.path, read_only=True) as device:
            with sprout(device.path, target, parent=directory) as made:
                clone = made.target / "clone"
                with virtual_file_of(seed, made.target) as source:
                    clone_file(source, clone, source_offset=0, size_bytes=10000)
                (made.target / "file").write_bytes(bytes(100000))


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
    traced(count, lambda: cycle(sparse_path))
    assert count.lines > 1000
    before = state_of_system()
    lines = random.Random(SEED).sample(range(1, count.lines), INTERRUPTED_LINES)
    for number in sorted(lines):
        trace = _InterruptAtLine(number)
        interrupted = False
        try:
            with interruptible():
                traced(trace, lambda: cycle(sparse_path))
        except KeyboardInterrupt:
            interrupted = True
        assert interrupted or not trace.where
        # As at the process's exit: for signals just before the first line of a cleanup.
        assert [o for o in process_ledger().sweep() if o.reason] == []
        assert state_of_system() == before, f"interrupted at {trace.where}"


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
