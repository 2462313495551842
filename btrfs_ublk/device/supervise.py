"""Supervise one device in the foreground, as a process that systemd looks after.

It executes ``python -m btrfs_ublk.device.supervise --foreground DIRECTORY LOCK-FD
[FD,…]`` in its own place. Supervisors and keepers of earlier versions, which had a
process for each device, start it without --foreground; then the daemon takes over.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from btrfs_ublk.base.log import log
from btrfs_ublk.device.daemon import have_daemon_supervise
from btrfs_ublk.device.endurance import stay_in_memory
from btrfs_ublk.device.keeper import kept_fds
from btrfs_ublk.device.locks import Lock, lock_file
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.requests import Replace, requests_by_signals
from btrfs_ublk.device.state import DeviceDirectory
from btrfs_ublk.device.supervisor import Supervisor
from btrfs_ublk.errors import BtrfsUblkError

_FOREGROUND = "--foreground"
_REVIVED = "--revived"

#: The time for a command that works on the device to end, perhaps because it is killed.
_LOCK_TIMEOUT_S = 10.0
#: With this exit status, the keeper tries again.
_TRY_AGAIN = 75


def supervise(
    directory: DeviceDirectory, lock: Lock, *, inherited: Sequence[int] = ()
) -> int:
    """Supervise until TERM or INT, which leave the server running; return an exit
    status. Messages go to stderr as well as to the device's log.

    ``lock`` is the directory's. ``inherited`` are descriptors that another program in
    our place kept open."""
    logbook = Logbook(directory.log)
    log.handlers[:] = [
        logbook.handler(),
        *(log.handlers or [logging.StreamHandler()]),
    ]
    log.setLevel(logging.INFO)
    log.propagate = False
    stay_in_memory()
    with requests_by_signals() as asked:
        while True:
            try:
                inherited = inherited or kept_fds(directory.state().keepers)
                supervisor = Supervisor(directory, asked, logbook, inherited=inherited)
                supervisor.begin()
                try:
                    return supervisor.run()
                except Replace:
                    inherited = supervisor.keep_open_fds
                    _replace_program(directory, lock, supervisor)
            except BtrfsUblkError as error:
                log.error("%s", error)
                return error.exit_status
            except Exception:
                # NB: nothing else reports it: the server runs on unsupervised.
                log.exception("the supervisor failed")
                return 1


def _replace_program(
    directory: DeviceDirectory, lock: Lock, supervisor: Supervisor
) -> None:
    """Execute the interpreter and package that the device is to have now. The process
    stays the same, for systemd and for the lock. Returns when it is not possible."""
    inherited = supervisor.keep_open_fds
    # The keeper takes us for dead when its pipe is closed.
    kept = [lock.fileno(), *inherited, *supervisor.keeper_fds]
    try:
        python = directory.spec().python
        log.info("replaced by %s", python)
        for fd in kept:
            os.set_inheritable(fd, True)
        os.execv(
            python,
            [
                # NB: without -P, Python would import from the current directory. -W:
                # it would warn of a module that its package has already imported.
                *(python, "-P", "-W", "ignore::RuntimeWarning:runpy"),
                *("-m", "btrfs_ublk.device.supervise", _FOREGROUND),
                *(str(directory.path), str(lock.fileno())),
                *([",".join(map(str, inherited))] if inherited else []),
            ],
        )
    except (OSError, BtrfsUblkError) as error:
        log.error("cannot be replaced by another program: %s", error)
        for fd in kept:
            os.set_inheritable(fd, False)


def _leave_to_daemon(directory: DeviceDirectory, lock_fd: int) -> int:
    """Have the daemon supervise; return an exit status for an old keeper."""
    lock = Lock(lock_fd) if lock_fd else None
    lock = lock or lock_file(directory.lock, timeout_s=_LOCK_TIMEOUT_S)
    if lock is None:
        return _TRY_AGAIN if directory.path.exists() else 0
    with lock:
        if lock_fd or directory.state().supervisor is not None:
            have_daemon_supervise(directory.path, lock.fileno(), sys.executable)
    return 0


def main() -> int:
    """Run as the module's docstring says."""
    modes = [word for word in sys.argv[1:] if word.startswith("--")]
    words = [word for word in sys.argv[1:] if word not in modes]
    directory = DeviceDirectory(Path(words[0]))
    if _FOREGROUND not in modes:
        return _leave_to_daemon(directory, 0 if _REVIVED in modes else int(words[1]))
    inherited = [int(word) for word in words[2].split(",")] if words[2:] else []
    lock = Lock(int(words[1]))
    for fd in (lock.fileno(), *inherited):
        os.set_inheritable(fd, False)
    return supervise(directory, lock, inherited=inherited)


if __name__ == "__main__":
    sys.exit(main())
