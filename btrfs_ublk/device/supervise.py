"""The supervisor's process: python -m btrfs_ublk.device.supervise
[--detach | --foreground] DIRECTORY LOCK-FD [FD,…], started by supervision.py, or by
itself in its own place.

With ``--detach``, a process of its own goes on, in a session of its own; its pid and
start time are printed, and this one ends.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from btrfs_ublk.device.endurance import stay_in_memory
from btrfs_ublk.device.locks import Lock
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.requests import Replace, requests
from btrfs_ublk.device.state import DeviceDirectory
from btrfs_ublk.device.supervisor import Supervisor
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.log import log
from btrfs_ublk.process import ProcessIdentity

_DETACH = "--detach"
_FOREGROUND = "--foreground"


def supervise(
    directory: DeviceDirectory,
    lock: Lock,
    *,
    foreground: bool,
    inherited: Sequence[int] = (),
) -> int:
    """Until TERM or INT, which leave the server serving; an exit status.

    ``lock`` is that of the directory. ``foreground``: say everything on stderr as well.
    """
    logbook = Logbook(directory.log)
    handlers = [logbook.handler()]
    if foreground:
        handlers += log.handlers or [logging.StreamHandler()]
    log.handlers[:] = handlers
    log.setLevel(logging.INFO)
    log.propagate = False
    stay_in_memory()
    with requests() as asked:
        while True:
            supervisor = None
            try:
                supervisor = Supervisor(directory, asked, logbook, inherited)
                return supervisor.run()
            except Replace:
                assert supervisor is not None
                inherited = supervisor.keep_open_fds
                _replace_program(directory, lock, inherited, foreground=foreground)
            except BtrfsUblkError as error:
                log.error("%s", error)
                return error.exit_status
            except Exception:
                # NB: nothing else tells of it: the server serves on unsupervised.
                log.exception("the supervisor failed")
                return 1


def command_line(
    python: str,
    directory: DeviceDirectory,
    lock: Lock,
    *,
    inherited: Sequence[int] = (),
    mode: str | None = _DETACH,
) -> list[str]:
    """Of a new process. NB: -P, or it would import what lies in the directory that it
    is started in.
    """
    return [
        *(python, "-P", "-m", "btrfs_ublk.device.supervise"),
        *([mode] if mode else []),
        *(str(directory.path), str(lock.fileno())),
        *([",".join(map(str, inherited))] if inherited else []),
    ]


def _replace_program(
    directory: DeviceDirectory,
    lock: Lock,
    inherited: Sequence[int],
    *,
    foreground: bool,
) -> None:
    """Go on as the interpreter and package that the device is to have. The same process
    keeps the lock, and its place in systemd's view. Returns when that is not possible.
    """
    kept = [lock.fileno(), *inherited]
    mode = _FOREGROUND if foreground else None
    try:
        python = directory.spec().python
        log.info("replaced by %s", python)
        for fd in kept:
            os.set_inheritable(fd, True)
        os.execv(
            python,
            command_line(python, directory, lock, inherited=inherited, mode=mode),
        )
    except (OSError, BtrfsUblkError) as error:
        log.error("cannot be replaced by another program: %s", error)
        for fd in kept:
            os.set_inheritable(fd, False)


def _detach(log_file: Path) -> None:
    """Returns in a process of its own, which no terminal and no parent knows."""
    pid = os.fork()
    if pid:
        print(json.dumps(asdict(ProcessIdentity.of(pid))), flush=True)
        os._exit(0)
    os.setsid()
    os.chdir("/")
    os.environ.pop("NOTIFY_SOCKET", None)  # of whoever started us
    null = os.open(os.devnull, os.O_RDWR)
    talk = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for target, source in ((0, null), (1, null), (2, talk)):
        os.dup2(source, target)
    os.close(null)
    os.close(talk)


def main() -> int:
    """See the module."""
    modes = [word for word in sys.argv[1:] if word.startswith("--")]
    words = [word for word in sys.argv[1:] if word not in modes]
    directory = DeviceDirectory(Path(words[0]))
    lock = Lock(int(words[1]))
    inherited = [int(word) for word in words[2].split(",")] if words[2:] else []
    for fd in (lock.fileno(), *inherited):
        os.set_inheritable(fd, False)
    if _DETACH in modes:
        _detach(directory.log)
    return supervise(
        directory, lock, foreground=_FOREGROUND in modes, inherited=inherited
    )


if __name__ == "__main__":
    sys.exit(main())
