"""How commands have devices supervised, and let go of: they find or start the host's
daemon (daemon.py), ask it, and wait for what becomes of a device.

Its directory, ``daemon`` beside ``devices``, has the socket it listens on, the lock
that it holds as long as it lives, and its log. A request is one message, and so is its
reply: JSON, with descriptors.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import make_private
from btrfs_ublk.base.process import (
    Child,
    ProcessIdentity,
    RunningServer,
    continue_process,
    is_stopped,
    launch,
    readable,
)
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.inotify import wait_for_change
from btrfs_ublk.device.locks import Lock, holder_of, is_locked, lock_file, openers_of
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.report import is_alive
from btrfs_ublk.device.state import DeviceDirectory, DeviceState, devices_directory
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, error_of_status

_START_TIMEOUT_S = 120.0
#: It answers at once, except while another program takes its place.
_REPLY_TIMEOUT_S = 60.0
#: If it does not answer within this time, somebody may have stopped it (SIGSTOP).
_SILENT_S = 0.5
_RETRY_S = 0.02
#: How many daemons that end at once are started, and how many log lines are shown.
_MOST_STARTS = 3
_MOST_LINES = 10
_BACKLOG = 128
#: A process that only checks whether a device is locked, locks it for a moment.
_LOOK_S = 0.1
#: The time for a supervisor to end when asked; killing it then does no harm.
_DETACH_TIMEOUT_S = 5.0
#: The time for a daemon to end that has nothing left to supervise.
_END_TIMEOUT_S = 2.0
#: The time for others to let go of the daemon's lock, before and after they are asked.
_DAEMON_LOCK_TIMEOUT_S = 0.5
_MOST_DAEMONS = 10
_MAX_BYTES = 1 << 20
#: Processes in the daemon's namespaces of these kinds see its files and network.
_NAMESPACES = ("mnt", "net")
_HINT = "set BTRFS_UBLK_RUN_DIR to a directory that only you can write to"


class NoDaemon(Exception):
    """No daemon runs, or it ended before it answered."""


@dataclass(frozen=True)
class DaemonDirectory:
    """The directory of a daemon, with its files."""

    path: Path

    @classmethod
    def of_host(cls, *, make: bool = False) -> DaemonDirectory:
        path = devices_directory(make=make).parent / "daemon"
        if make:
            make_private(path, what="daemon directory", hint=_HINT)
        return cls(path)

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def log(self) -> Path:
        return self.path / "log"

    def listening_socket(self) -> socket.socket:
        """Make the socket that the daemon listens on. The caller holds the lock."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._short() as name:
                with suppress(FileNotFoundError):
                    os.unlink(name)
                listener.bind(name)
                os.chmod(name, 0o600)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """Connect to the daemon. Raises NoDaemon."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                with self._short() as name:
                    connection.connect(name)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise NoDaemon from error
            yield connection

    @contextmanager
    def _short(self) -> Iterator[str]:
        """Yield a name of the socket that fits into 108 bytes (unix(7), sun_path)."""
        fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}/socket"
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Request:
    """A request to a daemon; ``fds`` go with it."""

    name: str
    keys: dict[str, Any]
    fds: Sequence[int] = ()

    def send(self, connection: socket.socket) -> None:
        """Send the request. Raises NoDaemon."""
        message = json.dumps({"request": self.name, **self.keys}).encode()
        try:
            socket.send_fds(connection, [message], list(self.fds))
        except ConnectionError as error:
            raise NoDaemon from error

    def reply(self, connection: socket.socket, *, timeout_s: float) -> dict[str, Any]:
        """Wait for the reply; a daemon that is stopped (SIGSTOP) is continued. Raises
        NoDaemon, and BtrfsUblkError for a refusal, or when no reply comes in time."""
        if not readable([connection], timeout_s=min(_SILENT_S, timeout_s)):
            wake_daemon()
        connection.settimeout(timeout_s)
        try:
            reply = connection.recv(_MAX_BYTES)
        except TimeoutError:
            raise BtrfsUblkError(
                f"the daemon does not answer within {timeout_s:g} s",
                hint=f"see {DaemonDirectory.of_host().log}",
            ) from None
        except ConnectionError as error:
            raise NoDaemon from error
        if not reply:
            raise NoDaemon
        answer: dict[str, Any] = json.loads(reply)
        if "error" in answer:
            kind = error_of_status(answer["exit_status"])
            raise kind(answer["error"], hint=answer.get("hint"))
        return answer


def ask_daemon(
    name: str, keys: dict[str, Any], *, timeout_s: float, fds: Sequence[int] = ()
) -> dict[str, Any]:
    """Send a request, and return the daemon's reply. Raises NoDaemon, and
    BtrfsUblkError when it refuses, or does not answer in time."""
    request = Request(name, keys, fds)
    with DaemonDirectory.of_host().connected() as connection:
        request.send(connection)
        return request.reply(connection, timeout_s=timeout_s)


def _reach_daemon(stack: ExitStack, python: str) -> tuple[socket.socket, bool]:
    """Connect to a daemon, and start one if there is none; return whether it is new.
    Raises CommandError, NoDaemon."""
    if python == sys.executable and _started:
        started = _started.pop()
    else:
        # NB: if one has just ended, the socket may be systemd's, which starts the next:
        # to listen in its place would make it useless.
        with suppress(NoDaemon):
            return stack.enter_context(DaemonDirectory.of_host().connected()), False
        started = _Started(python)
    stack.callback(started.close)
    return started.connection, True


class _Started:
    """A daemon that this process has started, and a connection to it. It ends when that
    is closed, unless it has something to supervise by then."""

    def __init__(self, python: str) -> None:
        """Raises CommandError, and NoDaemon when another one is starting or ending."""
        place = DaemonDirectory.of_host(make=True)
        with ExitStack() as stack:
            lock = lock_file(place.lock)
            if lock is None:
                raise NoDaemon
            stack.enter_context(lock)
            listener = stack.enter_context(place.listening_socket())
            # NB: before it starts, because a daemon ends at once when nobody asks it.
            connected = ExitStack()
            self.connection = connected.enter_context(place.connected())
            stack.push(connected)
            fds = [lock.fileno(), listener.fileno()]
            words = ["--detach", f"--lock={fds[0]}", f"--listen={fds[1]}"]
            self._child: Child = launch(
                [*daemon_command(python), *words, place.path],
                hint=_hint_for(python),
                keep_open_fds=fds,
                death_signal=None,
                talk=place.log,
                new_session=True,
            )
            # Once only the daemon has the listener, the connection ends when it does.
            listener.close()
            lock.close()
            self._connected = connected
            stack.pop_all()

    def close(self) -> None:
        self._connected.close()
        # It leaves the daemon to init, and ends.
        self._child.wait(_START_TIMEOUT_S)
        self._child.close()


#: Daemons that were started before they are needed.
_started: list[_Started] = []


@contextmanager
def daemon_starting() -> Iterator[None]:
    """Start a daemon, if none runs, that is ready when the block has a device
    supervised. If it does not, the daemon ends again."""
    started: _Started | None = None
    with deferred(), suppress(BtrfsUblkError, OSError, NoDaemon):
        place = DaemonDirectory.of_host(make=True)
        if not is_locked(place.lock):
            try:
                with place.connected():  # systemd listens, and starts one
                    pass
            except NoDaemon:
                started = _Started(sys.executable)
                _started.append(started)
    try:
        yield
    finally:
        if started in _started:
            _started.remove(started)
            started.close()


def have_daemon_supervise(
    directory: Path, lock_fd: int, python: str
) -> ProcessIdentity:
    """Hand a device's lock to the daemon, which is started if none runs, and return its
    identity. Raises BtrfsUblkError."""
    keys = {"directory": str(directory), "namespaces": own_namespaces()}
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    starts = 0
    with deferred(), open(os.memfd_create("environment", os.MFD_CLOEXEC), "w+") as file:
        # The device's servers get this process's environment.
        json.dump(dict(os.environ), file)
        file.flush()
        request = Request("supervise", keys, [lock_fd, file.fileno()])
        while starts < _MOST_STARTS and time.monotonic() < deadline_s:
            with ExitStack() as stack, suppress(NoDaemon):
                connection, is_new = _reach_daemon(stack, python)
                starts += is_new
                request.send(connection)
                reply = request.reply(connection, timeout_s=_REPLY_TIMEOUT_S)
                return identity_in(reply)
            time.sleep(_RETRY_S)
        raise BtrfsUblkError(
            f"the daemon ends as soon as it is started{_words_of_daemon()}",
            hint=_hint_for(python),
        )


def wake_daemon() -> None:
    with suppress(ProcessLookupError, BtrfsUblkError):
        daemon = holder_of(DaemonDirectory.of_host().lock)
        if is_daemon(daemon) and is_stopped(daemon):
            log.warning("daemon %d was stopped: it goes on", daemon.pid)
            continue_process(daemon)


def is_daemon(process: ProcessIdentity) -> bool:
    try:
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"btrfs_ublk.daemon" in words and process.is_alive()


def _words_of_daemon() -> str:
    lines = Logbook(DaemonDirectory.of_host().log).tail()
    return "".join(f"\n  {line}" for line in lines[-_MOST_LINES:])


def _hint_for(python: str) -> str:
    return (
        f"see whether this works: {python} -P -m btrfs_ublk.daemon --check; if not, "
        f"install btrfs-ublk for {python} again"
    )


def daemon_command(python: str) -> list[str]:
    """Return the command, without options and the daemon's directory."""
    # NB: without -P, Python would import modules from the current directory.
    return [python, "-P", "-m", "btrfs_ublk.daemon"]


def identity_in(keys: dict[str, Any]) -> ProcessIdentity:
    return ProcessIdentity(int(keys["pid"]), int(keys["start_ticks"]))


def own_namespaces() -> list[str]:
    return [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]


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
            with suppress(ProcessLookupError), closing(RunningServer(supervisor)) as x:
                _kill(x, "daemon", "does not release a device")
            return True
        time.sleep(_RETRY_S)
    if is_last:
        supervisor.wait(timeout_s=_END_TIMEOUT_S)
    return True


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
    with suppress(ProcessLookupError), closing(RunningServer(supervisor)) as process:
        process.signal(signal.SIGHUP)


def end_supervisor(supervisor: ProcessIdentity) -> None:
    """Ask, wait, kill. Its server runs on in any case. Raises LeftoverError."""
    with suppress(ProcessLookupError), closing(RunningServer(supervisor)) as process:
        process.signal(signal.SIGTERM)
        if not process.wait(_DETACH_TIMEOUT_S):
            _kill(process, "supervisor", "does not end when asked")


def _kill(process: RunningServer, what: str, why: str) -> None:
    """Kill a supervisor or the daemon. Raises LeftoverError when it hangs."""
    log.warning("%s %d %s: it is killed", what, process.pid, why)
    if not process.kill():
        raise LeftoverError(
            f"{what} {process.pid} was killed, but hangs in the kernel",
            hint="see the kernel log: dmesg",
        )


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
