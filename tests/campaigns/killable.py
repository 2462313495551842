"""Devices whose servers are killed: recovered by this module, or by a supervisor; and
signals to all that serves devices.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from verified_reads import NoAnswerError

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.process import (
    Child,
    ProcessIdentity,
    describe_exit,
    launch,
    readable,
    run,
)
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device import (
    DeviceOptions,
    add_device,
    recover_device,
    remove_device,
)
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.errors import BtrfsUblkError, CommandError
from btrfs_ublk.kernel import loop
from btrfs_ublk.server import Description, FrontEndName
from btrfs_ublk.server.control import Message
from btrfs_ublk.server.fuse import attach_loop
from btrfs_ublk.server.fuse_connection import FuseConnection

T = TypeVar("T")

#: Time for a process to start, be ready or end. It is much more than that takes.
TIMEOUT_S = 60.0
_POLL_S = 0.001
#: What was stopped goes on after that, at most.
_LONGEST_STOP_S = 0.5
_LINES = 30
_REISSUE = ("--recovery", "reissue")


class KillableDevice(AbstractContextManager[Any], Protocol):
    """A device that is made when entered, and removed at the end."""

    @property
    def path(self) -> Path:
        """The block device."""

    @property
    def has_supervisor(self) -> bool: ...

    def server(self) -> ProcessIdentity:
        """Return the process that serves, or is about to."""

    def next_server(self, dead: ProcessIdentity) -> ProcessIdentity:
        """Wait for the dead server's successor, or start it if no supervisor does.
        Raises NoAnswerError.
        """

    def wait_ready(self) -> object:
        """Wait until the last server says that it serves. Raises NoAnswerError."""

    def kill_supervisor(self) -> None: ...

    def recover(self) -> None:
        """Start a supervisor again, which starts a server."""

    def restore(self) -> None:
        """Have a server after an error, so that all can be taken down in order."""

    def describe(self) -> str:
        """Describe the device, for a report about a hang."""


def kill(server: ProcessIdentity) -> None:
    """Send SIGKILL, and wait until the process has ended. Raises NoAnswerError."""
    os.kill(server.pid, signal.SIGKILL)
    if not server.wait(timeout_s=TIMEOUT_S):
        raise NoAnswerError(f"process {server.pid} does not die")


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
    serve_on: Collection[str] = ("servers",),
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, int]:
    """Send signals to the living processes of roles, see Signal. Those that get KILL or
    TERM have ended afterwards, but for roles that may ``serve_on`` after TERM. Those
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
            one.number == signal.SIGTERM and one.role not in serve_on
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


def kernel_log() -> str:
    """Return the kernel log's last lines."""
    try:
        lines = run(["dmesg"], timeout_s=10).stdout.splitlines()
    except CommandError as error:
        return str(error)
    return "\n".join(lines[-_LINES:])


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


class _Ublk:
    """ServerByHand's part for this front end."""

    name = "ublk"
    keep_open_fds: Sequence[int] = ()

    def __init__(self) -> None:
        self._id = 0

    def attach(self, ready: Message, server: ServerByHand) -> Path:
        """Return the block device of the first server."""
        self._id = ready["id"]
        return Path(ready["device"])

    def next_options(self) -> list[str]:
        return ["--recover", str(self._id)]

    def detach(self, server: ServerByHand) -> None:
        """The server removes the device itself."""

    def describe(self) -> str:
        return run([helper_path(SERVER), "--list-devices"], timeout_s=TIMEOUT_S).stdout


class _Fuse:
    name = "fuse"

    def __init__(self) -> None:
        self._connection: FuseConnection | None = None
        self._device: Path | None = None

    @property
    def keep_open_fds(self) -> Sequence[int]:
        return self._connection.descriptors() if self._connection else ()

    def attach(self, ready: Message, server: ServerByHand) -> Path:
        description = server.description
        self._device = attach_loop(
            ready,
            server.tag,
            size_bytes=description.size,
            read_only=description.read_only,
        )
        self._connection = FuseConnection.of_server(ready, server.server())
        return self._device

    def next_options(self) -> list[str]:
        assert self._connection is not None
        return [*_REISSUE, *self._connection.arguments()]

    def detach(self, server: ServerByHand) -> None:
        if self._device is not None:
            loop.detach(self._device, server.tag)
        if self._connection is not None:
            self._connection.close()

    def describe(self) -> str:
        return str(self._device)


class ServerByHand:
    """A device of the C helper alone. When a server is dead, we start the next one.

    ``with ServerByHand(description, front_end="ublk") as device:``
    """

    has_supervisor = False

    def __init__(self, description: Description, *, front_end: FrontEndName) -> None:
        self.description = description
        self.tag = secrets.token_hex(8)
        self._front_end = _Ublk() if front_end == _Ublk.name else _Fuse()
        self._child: Child | None = None
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        assert self._path is not None
        return self._path

    def server(self) -> ProcessIdentity:
        assert self._child is not None
        return self._child.identity

    def __enter__(self) -> ServerByHand:
        try:
            self._launch(_REISSUE)
            self._path = self._front_end.attach(self.wait_ready(), self)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def next_server(self, dead: ProcessIdentity) -> ProcessIdentity:
        self._launch(self._front_end.next_options())
        return self.server()

    def wait_ready(self) -> Message:
        child = self._child
        assert child is not None and child.stdout is not None
        if not readable([child.stdout], timeout_s=TIMEOUT_S):
            raise NoAnswerError(child.failure(f"is not ready after {TIMEOUT_S:g} s"))
        line = child.stdout.readline()
        if not line:
            raise BtrfsUblkError(child.failure("ended before it was ready"))
        ready: Message = json.loads(line)
        return ready

    def kill_supervisor(self) -> None:
        raise BtrfsUblkError("a server that is run by hand has no supervisor to kill")

    def recover(self) -> None:
        raise BtrfsUblkError("a server that is run by hand is recovered by hand")

    def restore(self) -> None:
        if not self.server().is_alive():
            self.next_server(self.server())
            self.wait_ready()

    def describe(self) -> str:
        words = self._child.stderr_tail() if self._child else ""
        return f"{self._front_end.describe()}; server {self.server()} says: {words}"

    def _launch(self, options: Sequence[str]) -> None:
        with deferred():
            if self._child is not None:
                self._child.close()
            self._child = launch(
                [
                    *(helper_path(SERVER), "--front-end", self._front_end.name),
                    *("--tag", self.tag, *options, "-"),
                ],
                stdin=self.description.to_json(),
                pipe_stdout=True,
                keep_open_fds=self._front_end.keep_open_fds,
            )

    def _stop(self) -> None:
        """Stop the server of an unmounted device. Raises CommandError."""
        if self._child is None:
            return
        with deferred():
            self._front_end.detach(self)
            status = self._child.stop(timeout_s=TIMEOUT_S)
            if status != 0:
                raise CommandError(self._child.failure(describe_exit(status)))
            self._child.close()


class SupervisedDevice:
    """A device of the package: its supervisor starts the next server.

    ``with SupervisedDevice(description, front_end="ublk") as device:``
    """

    has_supervisor = True

    def __init__(self, description: Description, *, front_end: FrontEndName) -> None:
        self._description = description
        self._options = DeviceOptions(front_end=front_end)
        self._name = f"bench-{secrets.token_hex(4)}"
        self._directory = device_directory(self._name)

    def __enter__(self) -> SupervisedDevice:
        add_device(self._name, self._description, self._options)
        return self

    def __exit__(self, *_: object) -> None:
        remove_device(self._name)

    @property
    def path(self) -> Path:
        return Path(str(self._directory.state().device))

    def server(self) -> ProcessIdentity:
        return soon(
            lambda: self._directory.state().server, f"{self._name} has no server"
        )

    def next_server(self, dead: ProcessIdentity) -> ProcessIdentity:
        def is_another() -> ProcessIdentity | None:
            found = self._directory.state().server
            return None if found == dead else found

        return soon(is_another, f"server {dead.pid} has no successor")

    def wait_ready(self) -> None:
        def is_serving() -> bool | None:
            state = self._directory.state()
            alive = state.server is not None and state.server.is_alive()
            return (state.status == "serving" and alive) or None

        soon(is_serving, f"{self._name} does not serve")

    def kill_supervisor(self) -> None:
        supervisor = self._directory.state().supervisor
        if supervisor is None:
            raise BtrfsUblkError(f"{self._name} has no supervisor")
        kill(supervisor)

    def recover(self) -> None:
        recover_device(self._name)

    def restore(self) -> None:
        recover_device(self._name)

    def describe(self) -> str:
        log = self._directory.log.read_text().splitlines()
        return "\n".join([str(self._directory.state()), *log[-_LINES:]])
