"""Start, wait for and end supervisors; for commands."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.device.daemon import (
    DaemonDirectory,
    NoDaemon,
    ask_daemon,
    daemon_command,
    have_daemon_supervise,
    identity_in,
    is_daemon,
)
from btrfs_ublk.device.inotify import wait_for_change
from btrfs_ublk.device.locks import Lock, is_locked, lock_file, openers_of
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.report import is_alive
from btrfs_ublk.device.running import RunningServer, continue_process, is_stopped
from btrfs_ublk.device.state import DeviceDirectory, DeviceState
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, error_of_status

#: A process that only checks whether a device is locked, locks it for a moment.
_LOOK_S = 0.1
#: The time for a supervisor to end when asked; killing it then does no harm.
_DETACH_TIMEOUT_S = 5.0
#: The time for a daemon to end that has nothing left to supervise.
_END_TIMEOUT_S = 2.0
#: The time for others to let go of the daemon's lock, before and after they are asked.
_DAEMON_LOCK_TIMEOUT_S = 0.5
_MOST_DAEMONS = 10
#: The time between two checks of a lock.
_RETRY_S = 0.01


def start_supervisor(
    directory: DeviceDirectory, lock: Lock, python: str
) -> ProcessIdentity:
    """Have the host's daemon supervise. It inherits our lock, so the lock is always
    held. ``python`` is for a daemon that has to be started. Raises BtrfsUblkError."""
    return have_daemon_supervise(directory.path, lock.fileno(), python)


def wait_until_serving(
    directory: DeviceDirectory,
    supervisor: ProcessIdentity,
    *,
    timeout_s: float,
    is_to_stay: bool = True,
) -> DeviceState:
    """Wait until the device serves. Raises the error that its supervisor noted
    (UsageError for a description that the server refuses, CapabilityError), or
    BtrfsUblkError after ``timeout_s`` seconds. A stopped supervisor is continued.

    ``is_to_stay``: the caller does not remove the device, and its log, when this fails.
    """

    def has_settled(state: DeviceState) -> bool:
        if is_stopped(supervisor):
            continue_process(supervisor)
        is_serving = state.supervisor == supervisor and state.status == "serving"
        # NB: the supervisor may not have noticed the death of a server yet.
        if is_serving and is_alive(state.server):
            return True
        return state.supervisor != supervisor or not supervisor.is_alive()

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
    if state.status == "serving" and is_alive(state.supervisor):
        return state
    # NB: it may have ended after ``state`` was read, and have noted why before it did.
    return _raise_failure(directory, directory.state())


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
    """Return the first state that fulfils the condition; None after ``timeout_s``."""

    def fulfilled() -> DeviceState | None:
        state = directory.state()
        return state if condition(state) else None

    return wait_for_change(directory.path, fulfilled, timeout_s=timeout_s)


def take_lock(directory: DeviceDirectory, *, timeout_s: float = _LOOK_S) -> Lock | None:
    """Return the lock; None when a supervisor, or another command, has it."""
    return lock_file(directory.lock, timeout_s=timeout_s)


def detach_supervisor(directory: DeviceDirectory, *, timeout_s: float) -> Lock:
    """Take the device's lock from its supervisor, whose server runs on.

    Raises BtrfsUblkError when another command, or one supervisor after another, has it
    for ``timeout_s`` seconds; LeftoverError for a supervisor that does not end.
    """
    deadline_s = time.monotonic() + timeout_s
    is_late = False
    wait_s = 0.0  # Nearly always, a supervisor has it, and has to be asked for it.
    while True:
        lock = take_lock(directory, timeout_s=wait_s)
        wait_s = _LOOK_S
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
            if not _daemon_lets_go(directory, supervisor):
                end_supervisor(supervisor)
        # After the deadline, try once more: the supervisor may have ended now.
        is_late = time.monotonic() > deadline_s


def _daemon_lets_go(directory: DeviceDirectory, supervisor: ProcessIdentity) -> bool:
    """Return False when the supervisor is not the daemon. A daemon that does not let go
    is killed; then keepers start another one, for all its devices."""
    if is_stopped(supervisor):
        continue_process(supervisor)
    keys = {"directory": str(directory.path)}
    is_last = False
    try:
        reply = ask_daemon("release", keys, timeout_s=_DETACH_TIMEOUT_S)
        if identity_in(reply) != supervisor:
            return False
        is_last = bool(reply["is_last"])
    except NoDaemon:
        # If the daemon lives, it stopped listening before it answered: ask again.
        time.sleep(_RETRY_S)
        return is_daemon(supervisor)
    except BtrfsUblkError as error:
        if not is_daemon(supervisor):
            return False
        log.warning("%s", error)
    deadline_s = time.monotonic() + _DETACH_TIMEOUT_S
    while is_locked(directory.lock):
        if time.monotonic() > deadline_s:
            _kill_daemon(supervisor)
            return True
        time.sleep(_RETRY_S)
    if is_last:
        supervisor.wait(timeout_s=_END_TIMEOUT_S)
    return True


def _kill_daemon(daemon: ProcessIdentity) -> None:
    log.warning("daemon %d does not release a device: it is killed", daemon.pid)
    with suppress(ProcessLookupError):
        process = RunningServer(daemon)
        try:
            if not process.kill():
                raise LeftoverError(
                    f"daemon {daemon.pid} was killed, but hangs in the kernel",
                    hint="see the kernel log: dmesg",
                )
        finally:
            process.close()


def have_replaced(directory: DeviceDirectory, *, python: str | None) -> None:
    """Have the supervisor, if any, read the device's new spec. With ``python``, that
    interpreter and its package replace the supervisor's program."""
    supervisor = directory.state().supervisor
    if supervisor is None:
        return
    keys = {"directory": str(directory.path), "python": python}
    try:
        reply = ask_daemon("replace", keys, timeout_s=_DETACH_TIMEOUT_S)
        if identity_in(reply) == supervisor:
            return
    except NoDaemon:
        pass
    with suppress(ProcessLookupError):
        process = RunningServer(supervisor)
        process.signal(signal.SIGHUP)
        process.close()


def end_supervisor(supervisor: ProcessIdentity) -> None:
    """Ask, wait, kill. Its server runs on in any case. Raises LeftoverError."""
    with suppress(ProcessLookupError):
        process = RunningServer(supervisor)
        try:
            process.signal(signal.SIGTERM)
            if not process.wait(_DETACH_TIMEOUT_S):
                log.warning(
                    "supervisor %d does not end when asked: it is killed",
                    supervisor.pid,
                )
                if not process.kill():
                    raise LeftoverError(
                        f"supervisor {supervisor.pid} was killed, but hangs in the "
                        "kernel",
                        hint="see the kernel log: dmesg",
                    )
        finally:
            process.close()


def become_daemon() -> NoReturn:
    """Execute the daemon in this process, for systemd. One that a command or a keeper
    has started is asked to end. Raises BtrfsUblkError when it does not."""
    place = DaemonDirectory.of_host(make=True)
    for _ in range(_MOST_DAEMONS):
        lock = lock_file(place.lock, timeout_s=_DAEMON_LOCK_TIMEOUT_S)
        if lock is not None:
            break
        # NB: keepers have the file open, too, and one may start a daemon meanwhile.
        for process in filter(is_daemon, openers_of(place.lock)):
            log.info("daemon %d is asked to end: systemd has started this", process.pid)
            end_supervisor(process)
    else:
        raise BtrfsUblkError(
            f"another daemon holds {place.lock}",
            hint=f"see who that is: fuser {place.lock}",
        )
    os.set_inheritable(lock.fileno(), True)
    words = ["--managed", f"--lock={lock.fileno()}", str(place.path)]
    os.execv(sys.executable, [*daemon_command(sys.executable), *words])
