"""Signals to all that serves devices, what they wait for, and volumes that are down."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from support.verified_reads import NoAnswerError

from btrfs_ublk.base.process import ProcessIdentity, run
from btrfs_ublk.device import recover_device
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.server import BlockServer, ZeroSegment
from btrfs_ublk.volume.store import volume_directory

T = TypeVar("T")

#: Time for a process to start, be ready or end. It is much more than that takes.
TIMEOUT_S = 60.0
_POLL_S = 0.001
#: What was stopped goes on after that, at most.
_LONGEST_STOP_S = 0.5
_CHECK_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Signal:
    """What processes of a role get."""

    number: signal.Signals
    role: str

    @classmethod
    def parse(cls, word: str) -> Signal:
        """Parse a role, which is to get KILL, or the name of a signal and a role."""
        *name, role = word.split()
        return cls(signal.Signals[f"SIG{name[0] if name else 'KILL'}"], role)


def serving(devices: Sequence[str], role: str) -> list[ProcessIdentity]:
    """Return the living "servers", "keepers" or "daemon" of devices. One that is there
    for several devices is returned once. A device has two keepers while one replaces
    the other."""
    found = dict[ProcessIdentity, None]()
    for device in devices:
        state = device_directory(device).state()
        if role == "keepers":
            found |= dict.fromkeys(each.process for each in state.keepers)
        else:
            one = {"servers": state.server, "daemon": state.supervisor}[role]
            found |= {} if one is None else {one: None}
    return [each for each in found if each.is_alive()]


def signal_at_once(
    words: Sequence[str],
    living: Callable[[str], Sequence[ProcessIdentity]],
    chances: random.Random,
    *,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, int]:
    """Send signals to the living processes of roles, see Signal. Those that get KILL or
    TERM have ended afterwards, but for servers, which may serve on after TERM. Those
    that get STOP get CONT, a random time after all others got theirs.

    Returns when it was, or when what was stopped went on (CLOCK_MONOTONIC, in ns), and
    how many processes got a signal.
    """
    begin_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    got = dict[ProcessIdentity, signal.Signals]()
    ending = list[ProcessIdentity]()
    signals = [Signal.parse(word) for word in words]
    # What is stopped must be so when the others die.
    signals.sort(key=lambda one: (one.number != signal.SIGSTOP, chances.random()))
    for one in signals:
        found = living(one.role)
        got |= dict.fromkeys(found, one.number)
        if one.number == signal.SIGKILL or (
            one.number == signal.SIGTERM and one.role != "servers"
        ):
            ending += found
    stopped = [each for each, number in got.items() if number == signal.SIGSTOP]
    try:
        for each, number in got.items():
            with suppress(ProcessLookupError):
                os.kill(each.pid, number)
        for each in ending:
            each.wait(timeout_s=timeout_s)
        if stopped:
            time.sleep(chances.uniform(0, _LONGEST_STOP_S))
            begin_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    finally:
        for each in stopped:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGCONT)
    return begin_ns, len(got)


def have_all_supervised(devices: Sequence[str], words: Sequence[str]) -> None:
    """Recover devices that nothing does by itself: after TERM, a daemon has let them go
    on purpose. Raises BtrfsUblkError."""
    nobody = not (serving(devices, "keepers") or serving(devices, "daemon"))
    if nobody or "TERM daemon" in words:
        for device in devices:
            recover_device(device)


def soon(condition: Callable[[], T | None], what: str) -> T:
    """Wait for a value that is not None. Raises NoAnswerError, which says ``what``."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while (value := condition()) is None:
        if time.monotonic() > deadline_s:
            raise NoAnswerError(f"{what} after {TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    return value


def retry(operation: Callable[[], object], *, timeout_s: float) -> None:
    """Retry while something is in use, as another process of this machine may have
    copied our mounts to a mount namespace of its own. Raises LeftoverError."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            operation()
            return
        except LeftoverError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def btrfs_check(name: str) -> str:
    """Return the last messages of ``btrfs check`` for seed and sprout of a volume that
    is down; "": they are well. It finds the seed among all block devices, if that can
    be read to the end."""
    volume = volume_directory(name)
    seed = volume.seed()
    zeroes = ZeroSegment(offset=0, length=seed.virtual_data.size)
    with BlockServer(seed.description([zeroes])):
        done = run(
            ["btrfs", "check", "--readonly", volume.sprout_image],
            timeout_s=_CHECK_TIMEOUT_S,
            ok_statuses=range(256),
        )
    words = done.stdout + done.stderr
    return words[-2000:] if done.returncode else ""


def where_it_waits(pid: int) -> str:
    """Return the kernel's call stack of each thread of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            calls = [
                line.split()[-1]
                for line in (task / "stack").read_text().split("\n")
                if line
            ]
            found.append(f"pid {pid} thread {task.name}: {' < '.join(calls)}")
    return "\n".join(found)


# What is left.


def there_is(top: Path) -> set[str]:
    """Describe what there is of a campaign that has this directory: files, mounts, loop
    devices, processes."""
    found = {f"mount {x.target}" for x in read_mountinfo() if top in x.target.parents}
    found |= {f"loop device of {file}" for _, file in loops_below(top)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("BTRFS_UBLK_STATE_DIR") == str(top / "state"):
                found.add(f"process {Path((process.cmdline() or ['-'])[0]).name}")
    for place in ("run", "volumes", "images", "state", "work"):
        for directory, directories, files in os.walk(top / place):
            # What a daemon and a volume have is theirs; only names count.
            if Path(directory).parent == top / "volumes":
                directories[:] = []
            found |= {os.path.join(directory, name) for name in directories}
            found |= {os.path.join(directory, name) for name in files}
    ours = re.compile("/run/(daemon|tokens)")
    return {each for each in found if not ours.search(each)}


def settled(top: Path) -> set[str]:
    """Do so when no process starts or ends any more."""
    before: set[str] = set()
    while before != (now := there_is(top)):
        before = now
        time.sleep(0.5)
    return now


def differences_to(before: set[str], top: Path) -> list[str]:
    """Describe what is not as before, at last, as processes need a moment to end."""
    end_s = time.monotonic() + 10
    while (after := there_is(top)) != before and time.monotonic() < end_s:
        time.sleep(0.1)
    left, gone = sorted(after - before)[:10], sorted(before - after)[:10]
    return [f"is left: {x}" for x in left] + [f"is gone: {x}" for x in gone]
