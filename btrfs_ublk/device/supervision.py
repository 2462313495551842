"""Supervisors, seen from the commands that start, wait for and end them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from btrfs_ublk.device.locks import Lock, lock_file
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.report import is_alive
from btrfs_ublk.device.running import RunningServer
from btrfs_ublk.device.state import DeviceDirectory, DeviceState
from btrfs_ublk.device.supervise import command_line
from btrfs_ublk.device.watch import wait_for_change
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, error_of_status
from btrfs_ublk.interrupts import deferred
from btrfs_ublk.log import log
from btrfs_ublk.process import ProcessIdentity, run

_START_TIMEOUT_S = 120.0
#: Whoever only looks whether a device is locked, locks it for a moment.
_LOOK_S = 0.1
#: A supervisor that was asked to end; killing it does no harm.
_DETACH_TIMEOUT_S = 5.0


def start_supervisor(
    directory: DeviceDirectory, lock: Lock, python: str
) -> ProcessIdentity:
    """It inherits the lock, so there is no moment in which nobody has it."""
    with deferred():
        started = run(
            command_line(python, directory, lock),
            timeout_s=_START_TIMEOUT_S,
            keep_open_fds=[lock.fileno()],
        )
        keys = json.loads(started.stdout)
        return ProcessIdentity(int(keys["pid"]), int(keys["start_ticks"]))


def wait_until_serving(
    directory: DeviceDirectory,
    supervisor: ProcessIdentity,
    *,
    timeout_s: float,
    is_to_stay: bool = True,
) -> DeviceState:
    """Raise what its supervisor says is wrong (UsageError for a description that the
    server refuses, CapabilityError), or BtrfsUblkError after ``timeout_s`` seconds. A
    supervisor that somebody has stopped is woken.

    ``is_to_stay``: the caller does not remove the device, and its log, when this fails.
    """

    def has_settled(state: DeviceState) -> bool:
        if is_stopped(supervisor):
            continue_supervisor(supervisor)
        is_serving = state.supervisor == supervisor and state.status == "serving"
        # NB: a server that died may not have been noticed yet.
        if is_serving and is_alive(state.server):
            return True
        return not supervisor.is_alive()

    state = wait_for_state(directory, has_settled, timeout_s=timeout_s)
    if state is None:
        now = directory.state()
        text = (
            f"device {directory.name} does not serve after {timeout_s:g} s "
            f"({now.status}{f': {now.reason}' if now.reason else ''})"
        )
        hint = f"its supervisor goes on trying; see {directory.log}"
        if not is_to_stay:
            text += _last_words(directory)
            hint = "the device is removed again; a longer timeout gives it more time"
        raise BtrfsUblkError(text, hint=hint)
    if state.status == "serving" and supervisor.is_alive():
        return state
    return _raise_failure(directory, state)


def _last_words(directory: DeviceDirectory) -> str:
    return "".join(f"\n  {line}" for line in Logbook(directory.log).tail())


def _raise_failure(directory: DeviceDirectory, state: DeviceState) -> DeviceState:
    reason = state.reason or f"its supervisor has ended{_last_words(directory)}"
    text = f"device {directory.name}: {reason}"
    raise error_of_status(state.exit_status)(text)


def wait_for_state(
    directory: DeviceDirectory,
    condition: Callable[[DeviceState], bool],
    *,
    timeout_s: float,
) -> DeviceState | None:
    """The first state that fulfils the condition; None after ``timeout_s`` seconds."""

    def fulfilled() -> DeviceState | None:
        state = directory.state()
        return state if condition(state) else None

    return wait_for_change(directory.path, fulfilled, timeout_s=timeout_s)


def take_lock(directory: DeviceDirectory, *, timeout_s: float = _LOOK_S) -> Lock | None:
    """None when a supervisor, or another command, has it."""
    return lock_file(directory.lock, timeout_s=timeout_s)


def detach_supervisor(directory: DeviceDirectory, *, timeout_s: float) -> Lock:
    """The device's lock, taken from its supervisor, whose server serves on.

    Raises BtrfsUblkError when another command, or one supervisor after the other, has
    it for ``timeout_s`` seconds; LeftoverError for a supervisor that does not end.
    """
    deadline_s = time.monotonic() + timeout_s
    is_late = False
    while True:
        lock = take_lock(directory)
        if lock is not None:
            return lock
        directory.check()  # it may be gone
        if is_late:
            raise BtrfsUblkError(
                f"another command works on device {directory.name}",
                hint=f"wait for it, or see: fuser {directory.lock}",
            )
        supervisor = directory.state().supervisor
        if supervisor is not None and supervisor.is_alive():
            end_supervisor(supervisor)
        # What has ended by now is looked at once more.
        is_late = time.monotonic() > deadline_s


def end_supervisor(supervisor: ProcessIdentity) -> None:
    """Ask, wait, kill: its server serves on in any case. Raises LeftoverError."""
    with suppress(ProcessLookupError):
        process = RunningServer(supervisor)
        try:
            process.signal(signal.SIGTERM)
            if not process.wait(_DETACH_TIMEOUT_S):
                log.warning("supervisor %d does not end: killed", supervisor.pid)
                if not process.kill():
                    raise LeftoverError(
                        f"supervisor {supervisor.pid} hangs in the kernel, even killed",
                        hint="see the kernel log: dmesg",
                    )
        finally:
            process.close()


def continue_supervisor(supervisor: ProcessIdentity) -> None:
    """Wake one that is stopped; one that a debugger has is killed."""
    with suppress(ProcessLookupError):
        process = RunningServer(supervisor)
        try:
            process.signal(signal.SIGCONT)
            if is_stopped(supervisor) and not process.wait(_LOOK_S):
                if is_stopped(supervisor):
                    process.kill()
        finally:
            process.close()


def is_stopped(process: ProcessIdentity) -> bool:
    """By a signal, or a debugger: it does nothing until somebody lets it go on."""
    with suppress(OSError):
        stat = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
    return False
