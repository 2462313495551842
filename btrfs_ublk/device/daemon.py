"""Find or start the host's daemon, and ask it to supervise devices. Commands use this;
the daemon's own code is in btrfs_ublk/daemon/.

Its directory, ``daemon`` beside ``devices``, has the socket it listens on, the lock
that it holds as long as it lives, and its log. A request is one message, and so is its
reply: JSON, with descriptors.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from btrfs_ublk.base.fork import start_by_fork
from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import make_private
from btrfs_ublk.base.process import ProcessIdentity, readable, run
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.locks import holder_of, lock_file
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.running import continue_process, is_stopped
from btrfs_ublk.device.state import devices_directory
from btrfs_ublk.errors import BtrfsUblkError, error_of_status

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
_MAX_BYTES = 1 << 20
#: Processes in the daemon's namespaces of these kinds see its files and network.
_NAMESPACES = ("mnt", "net")
_HINT = "set BTRFS_UBLK_RUN_DIR to a directory that only you can write to"


#: Whether this process may fork the daemon.
_may_fork = False


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
            _wake_daemon()
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
            raise error_of_status(answer["exit_status"])(answer["error"])
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


def have_daemon_supervise(
    directory: Path, lock_fd: int, python: str
) -> ProcessIdentity:
    """Hand a device's lock to the daemon, which is started if none runs, and return its
    identity. Raises BtrfsUblkError."""
    keys = {"directory": str(directory), "namespaces": own_namespaces()}
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    said: list[str] = []
    with deferred(), open(os.memfd_create("environment", os.MFD_CLOEXEC), "w+") as file:
        # The device's servers get this process's environment.
        json.dump(dict(os.environ), file)
        file.flush()
        request = Request("supervise", keys, [lock_fd, file.fileno()])
        while len(said) < _MOST_STARTS and time.monotonic() < deadline_s:
            try:
                with DaemonDirectory.of_host().connected() as running:
                    with suppress(NoDaemon):
                        request.send(running)
                        return identity_in(
                            request.reply(running, timeout_s=_REPLY_TIMEOUT_S)
                        )
                    # NB: it ended. The socket may be systemd's, which starts the next
                    # one: to listen in its place would make its own socket useless.
                    time.sleep(_RETRY_S)
                    continue
            except NoDaemon:  # Nobody listens.
                pass
            with suppress(NoDaemon):
                return identity_in(_ask_new_daemon(request, python, said))
        raise BtrfsUblkError(
            f"the daemon ends as soon as it is started{_last_words(said)}",
            hint=_hint_for(python),
        )


def _ask_new_daemon(request: Request, python: str, said: list[str]) -> dict[str, Any]:
    """Start a daemon, and return its reply; its stderr is appended to ``said``. Raises
    CommandError, and NoDaemon, also when another one is just starting or ending."""
    place = DaemonDirectory.of_host(make=True)
    with ExitStack() as stack:
        lock = lock_file(place.lock)
        if lock is None:
            time.sleep(_RETRY_S)
            raise NoDaemon
        stack.enter_context(lock)
        listener = stack.enter_context(place.listening_socket())
        # NB: the request is sent before it starts, because a daemon ends at once when
        # there is nothing to do.
        connection = stack.enter_context(place.connected())
        request.send(connection)
        said.append(_start_daemon(place, python, lock.fileno(), listener.fileno()))
        # NB: once only the daemon has the listener, the connection ends when it does.
        listener.close()
        lock.close()
        return request.reply(connection, timeout_s=_REPLY_TIMEOUT_S)


def allow_fork() -> None:
    """Let this process fork the daemon, instead of executing it. For commands, which
    know what they have done: the daemon keeps what they have imported."""
    global _may_fork
    _may_fork = True


def _start_daemon(place: DaemonDirectory, python: str, lock: int, listener: int) -> str:
    """Start a daemon with these descriptors, and return its stderr, unless it is in its
    log. Raises CommandError."""
    command, fds = daemon_command(python), [lock, listener]
    options = [f"--lock={lock}", f"--listen={listener}", str(place.path)]
    if _may_fork and python == sys.executable:
        if start_by_fork(
            "btrfs_ublk.daemon.process",
            options,
            title=command,
            talk=place.log,
            keep_open_fds=fds,
        ):
            return ""
    return run(
        [*command, "--detach", *options],
        timeout_s=_START_TIMEOUT_S,
        hint=_hint_for(python),
        keep_open_fds=fds,
    ).stderr


def _wake_daemon() -> None:
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


def _last_words(said: list[str]) -> str:
    lines = said[-1].splitlines() if said else []
    lines += Logbook(DaemonDirectory.of_host().log).tail()
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
