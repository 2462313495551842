"""The daemon's process: python -m btrfs_ublk.daemon [--detach | --managed] --lock=FD
[--listen=FD] [--devices=FD] DIRECTORY

It holds the lock in its directory and listens on the socket there; --lock and --listen
are descriptors of both. It is started by a command (client.py), by a keeper when
the last daemon has died, by systemd (``btrfs-ublk daemon serve``), or by itself, as a
newer program in its own place. With --detach, it goes on in a new process, without a
terminal, whose parent has ended (btrfs_ublk/daemon.py). With
--managed, it is a service of systemd, which starts it again when it has died, listens
on the socket, and stores descriptors. --devices is a descriptor of a file that lists
the devices which the program before supervised.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import ProcessIdentity, close_all_but, run
from btrfs_ublk.device.endurance import stay_in_memory
from btrfs_ublk.device.locks import Lock, lock_file
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.notify import ServiceManager, StoredFds
from btrfs_ublk.device.requests import Detach, Replace, Requests, requests_by_signals
from btrfs_ublk.device.state import (
    RUN_VARIABLE,
    DeviceDirectory,
    DeviceState,
    device_directories,
    device_directory,
)
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.supervision.client import (
    DaemonDirectory,
    daemon_command,
    own_namespaces,
)
from btrfs_ublk.supervision.keeper import environment_of, kept_fds
from btrfs_ublk.supervision.supervisor import Supervisor
from btrfs_ublk.supervision.volume_requests import (
    VOLUME_REQUESTS,
    VolumeRequests,
    error_reply,
)

#: The time for who has connected to send a request: commands start a daemon before they
#: need it. The number of those that may be silent, and the time to take a reply.
_SILENT_TIMEOUT_S = 60.0
_MOST_SILENT = 64
_REPLY_TIMEOUT_S = 1.0
_MAX_BYTES = 1 << 16
_MOST_FDS = 2
#: The time for all supervisors to reach a point where another program can continue.
_PARK_TIMEOUT_S = 40.0
_CHECK_TIMEOUT_S = 30.0
#: How long a daemon of systemd without devices waits for requests. NB: systemd gives up
#: a socket whose service is started more than 20 times in 2 s.
_IDLE_S = 30.0
_FOREVER_S = 1e6
#: A device of these kinds of status is not supervised unless a command asks for it.
_OVER = ("failed", "lost", "removing")
_DESCRIPTORS = ("lock", "listen", "devices")
#: The delays before a supervisor is started again that has failed.
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 30.0
#: The stack of a device's thread; all of it is locked into memory.
_STACK_BYTES = 256 << 10
#: malloc.h: M_ARENA_MAX. NB: without it, each thread has its own arena.
_ARENA_MAX = -8


class Supervised:
    """A device and its thread. It takes over ``lock``, the directory's. ``inherited``
    are keep_open_fds of the supervisor before. The thread calls ``ended`` at its end.

    Servers get ``environment``; None: the same as the ones before. ``stored`` is
    systemd's store, if it runs this process."""

    def __init__(
        self,
        directory: DeviceDirectory,
        lock: Lock,
        *,
        revival: Sequence[str],
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stored: StoredFds | None = None,
        ended: Callable[[Supervised], object],
    ) -> None:
        """Raises BtrfsUblkError when the device's files are not valid."""
        self.directory = directory
        self.lock = lock
        self.requests = Requests()
        #: If the thread ended for another program: the descriptors for that program.
        self.parked: list[int] | None = None
        self.is_to_park = False
        self._revival = revival
        self._ended = ended
        self._stored = stored
        self._logbook = Logbook(directory.log)
        try:
            inherited = inherited or kept_fds(directory.state().keepers)
            environment = environment or environment_of(directory.state())
            restored = stored.restored() if stored is not None else None
            if restored is not None:
                environment = environment or restored[1]
                if inherited:  # They are of the same connection.
                    for fd in restored[0]:
                        os.close(fd)
                else:
                    inherited = restored[0]
            self.environment = dict(environment or os.environ)
            self._first = self._make(inherited)
            self._first.begin()
        except BaseException:
            self.requests.close()
            raise
        self.thread = threading.Thread(
            target=self._run, name=f"device {directory.name}"
        )

    def _make(self, inherited: Sequence[int]) -> Supervisor:
        return Supervisor(
            self.directory,
            self.requests,
            self._logbook,
            inherited=inherited or kept_fds(self.directory.state().keepers),
            revival=self._revival,
            environment=self.environment,
            stored=self._stored,
        )

    def _run(self) -> None:
        handler = self._logbook.handler(thread=self.thread.name)
        log.addHandler(handler)
        try:
            self._supervise()
        except Exception:
            log.exception("the supervisor of %s has ended", self.directory.name)
        finally:
            log.removeHandler(handler)
            handler.close()
            if self.parked is None:
                self._write_end()
            # NB: before others can have the lock, and ask whether a device is the last.
            self._ended(self)
            if self.parked is None:
                self.lock.close()

    def join(self) -> None:
        """Join the thread. NB: the descriptors of ``requests`` stay open until then:
        others may still ask, so these numbers must not be used for other files."""
        self.thread.join()
        self.requests.close()

    def _supervise(self) -> None:
        supervisor: Supervisor | None = self._first
        inherited: Sequence[int] = ()
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                if supervisor is None:
                    supervisor = self._make(inherited)
                    supervisor.begin()
                supervisor.run()
                supervisor.end()
                return
            except Replace:
                assert supervisor is not None
                inherited = supervisor.keep_open_fds
                if self.is_to_park:
                    self.parked = list(inherited)
                    return
                supervisor.close()
            except Exception as error:
                # NB: nothing else reports it: the server runs on unsupervised.
                if isinstance(error, BtrfsUblkError):
                    log.error("%s", error)
                else:
                    log.exception("the supervisor failed")
                inherited = ()
                if supervisor is not None:
                    inherited = supervisor.keep_open_fds
                    supervisor.close()
                if not self.directory.path.exists() or not self._pause(delay_s):
                    if supervisor is not None:
                        supervisor.end()
                    return
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            supervisor = None

    def _pause(self, delay_s: float) -> bool:
        """Wait; return False when the supervisor is asked to end meanwhile."""
        with suppress(Replace):
            try:
                self.requests.wait([], timeout_s=delay_s)
            except Detach:
                return False
        return True

    def _write_end(self) -> None:
        """Note that this process, which goes on, is no longer its supervisor."""
        with suppress(BtrfsUblkError, OSError):
            if self.directory.path.exists():
                state = self.directory.state()
                if state.supervisor is not None:
                    self.directory.write_state(state.but(supervisor=None))


class Daemon:
    """The daemon in the directory ``place``, with its ``lock`` and its ``listener``.
    ``manager`` is systemd, if it runs this process."""

    def __init__(
        self,
        place: DaemonDirectory,
        lock: Lock,
        listener: socket.socket,
        asked: Requests,
        manager: ServiceManager | None = None,
    ) -> None:
        self._place = place
        self._manager = manager
        self._lock = lock
        self._listener = listener
        self._devices: dict[str, Supervised] = {}
        self._asked = asked
        self._ended: list[Supervised] = []
        self._woken = Requests()
        #: Connections that have not asked yet, each with the time of its end.
        self._silent: dict[socket.socket, float] = {}
        self._volumes = VolumeRequests(place.log)
        self._python = sys.executable
        self._identity = asdict(ProcessIdentity.of_self())

    def run(self, before: Sequence[Mapping[str, Any]]) -> int:
        """Work until TERM or INT, or until there is neither a device nor a request;
        return an exit status. ``before`` are records of record_of()."""
        for each in before:
            self._go_on(each)
        self._adopt()
        self._say("READY=1")
        while True:
            try:
                self._serve()
                return 0
            except Detach:
                self._say("STOPPING=1")
                self._let_all_go()
                return 0
            except Replace:
                self._replace_program()

    def _serve(self) -> None:
        while True:
            ready = self._asked.wait(
                [self._listener, self._woken, *self._silent], timeout_s=self._idle_s()
            )
            self._forget_ended()
            for connection in [x for x in self._silent if x.fileno() in ready]:
                del self._silent[connection]
                self._answer(connection)
            if self._listener.fileno() in ready:
                self._silent[self._listener.accept()[0]] = (
                    time.monotonic() + _SILENT_TIMEOUT_S
                )
            self._volumes.tidy()
            self._drop_silent()
            if not (ready or self._devices or self._silent):
                return

    def _drop_silent(self) -> None:
        now_s, excess = time.monotonic(), len(self._silent) - _MOST_SILENT
        for number, (connection, end_s) in enumerate(list(self._silent.items())):
            if end_s <= now_s or number < excess:
                del self._silent[connection]
                connection.close()

    def _idle_s(self) -> float:
        if self._silent:
            return max(0.0, min(self._silent.values()) - time.monotonic())
        if self._devices:
            return self._volumes.idle_s() or _FOREVER_S
        if self._manager is None:
            return 0.0
        # NB: at our end, systemd drops what it stores of devices not supervised yet.
        return _FOREVER_S if self._manager.passed else _IDLE_S

    def _say(self, *assignments: str) -> None:
        if self._manager is not None:
            self._manager.notify(*assignments)

    def _forget_ended(self) -> None:
        with suppress(Replace):
            self._woken.check()
        while self._ended:
            device = self._ended.pop()
            device.join()
            path = str(device.directory.path)
            if self._devices.get(path) is device:
                del self._devices[path]
                if device.parked is not None:  # The other program did not start.
                    self._go_on(record_of(device))

    def _has_ended(self, device: Supervised) -> None:
        """Note that a device's thread is about to end, which calls this."""
        self._ended.append(device)
        self._woken.ask(Replace)

    # Devices that exist already

    def _revival(self) -> list[str]:
        """Return a keeper's arguments. It appends the lock's descriptor to them."""
        if self._manager is not None:
            return []  # systemd starts the next daemon.
        return [
            *("--lock", str(self._place.lock)),
            *daemon_command(self._python),
            *(str(self._place.path), "--lock="),
        ]

    def _adopt(self) -> None:
        """Supervise devices whose daemon has died. systemd's daemon supervises all that
        nobody does, as stopping a service and starting it again is to change nothing.
        """
        for directory in device_directories():
            with suppress(BtrfsUblkError, OSError):
                if not self._is_to_adopt(directory.state()):
                    continue
                if str(directory.path) in self._devices:
                    continue
                lock = lock_file(directory.lock)
                if lock is not None:
                    self._supervise(directory, lock)
        if self._manager is not None:
            _forget_removed(self._manager)

    def _is_to_adopt(self, state: DeviceState) -> bool:
        if self._manager is None:
            return state.reviving is not None
        return state.device is not None and state.status not in _OVER

    def _go_on(self, before: Mapping[str, Any]) -> None:
        lock = Lock(before["lock"])
        for fd in (lock.fileno(), *before["inherited"]):
            os.set_inheritable(fd, False)
        directory = DeviceDirectory(Path(before["directory"]))
        try:
            self._supervise(
                directory,
                lock,
                inherited=before["inherited"],
                environment=before["environment"],
            )
        except BtrfsUblkError as error:
            log.error("%s", error)

    def _supervise(
        self,
        directory: DeviceDirectory,
        lock: Lock,
        *,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        try:
            device = Supervised(
                directory,
                lock,
                revival=self._revival(),
                inherited=inherited,
                environment=environment,
                stored=self._stored(directory),
                ended=self._has_ended,
            )
            device.thread.start()
        except BaseException:
            lock.close()
            raise
        self._devices[str(directory.path)] = device

    def _stored(self, directory: DeviceDirectory) -> StoredFds | None:
        if self._manager is None:
            return None
        return StoredFds(self._manager, _name_in_store(directory))

    # Commands

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(_REPLY_TIMEOUT_S)
            message, fds, flags, _address = socket.recv_fds(
                connection, _MAX_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
            try:
                if not message:
                    return
                if flags & socket.MSG_TRUNC:
                    raise UsageError(f"a request of more than {_MAX_BYTES} bytes")
                request = _parsed(message)
                _check_peer(connection, request)
                if request["request"] not in VOLUME_REQUESTS:
                    reply = self._carry_out(request, fds)
                elif "if_ready" in request and not self._volumes.is_ready:
                    reply = {"not_ready": True}
                    with suppress(BtrfsUblkError):  # the client does without it
                        self._volumes.prepare()
                else:
                    self._volumes.pass_on(message, connection)
                    return
            except BtrfsUblkError as error:
                reply = error_reply(error)
            except Exception as error:
                log.exception("a request that fails")
                reply = {"error": f"the daemon: {error!r}", "exit_status": 1}
            finally:
                for fd in fds:
                    with suppress(OSError):
                        os.close(fd)
            connection.send(json.dumps({**self._identity, **reply}).encode())

    def _carry_out(self, message: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        path = message["directory"]
        device = self._devices.get(path)
        match message["request"]:
            case "supervise":
                self._check_namespaces(message["namespaces"])
                with os.fdopen(fds.pop(1)) as file:
                    file.seek(0)
                    environment = json.load(file)
                lock = Lock(fds.pop(0))
                self._supervise(
                    DeviceDirectory(Path(path)), lock, environment=environment
                )
                return {}
            case "release":
                if device is None:
                    return {"is_last": False}
                device.requests.ask(Detach)
                # The command waits for the end of a daemon that ends at once.
                is_last = len(self._devices) == 1 and self._manager is None
                return {"is_last": is_last}
            case "replace":
                if message["python"] is not None:
                    self._python = message["python"]
                    self._asked.ask(Replace)
                elif device is not None:
                    device.requests.ask(Replace)
                return {}
            case other:
                raise ValueError(other)

    def _check_namespaces(self, others: list[str]) -> None:
        if others != own_namespaces():
            raise UsageError(
                "the daemon runs in other mount or network namespaces than this "
                "command, so its servers would see other files and hosts",
                hint="set BTRFS_UBLK_RUN_DIR to another directory, which then has a "
                "daemon of its own",
            )

    # The end

    def _let_all_go(self) -> None:
        for device in self._devices.values():
            device.requests.ask(Detach)
        deadline_s = time.monotonic() + _PARK_TIMEOUT_S
        for device in self._devices.values():
            device.thread.join(max(0.0, deadline_s - time.monotonic()))

    def _replace_program(self) -> None:
        """Execute another program in this process, with all locks. Returns when that is
        not possible."""
        devices = list(self._devices.values())
        try:
            run([*daemon_command(self._python), "--check"], timeout_s=_CHECK_TIMEOUT_S)
            self._park(devices)
            self._volumes.end(timeout_s=_PARK_TIMEOUT_S)
            self._execute([x for x in devices if x.parked is not None])
        except (BtrfsUblkError, OSError) as error:
            log.error("cannot be replaced by another program: %s", error)
        self._python = sys.executable
        for device in devices:
            if device.parked is None:
                device.is_to_park = False
                device.requests.ask(Replace)
        self._forget_ended()

    def _park(self, devices: list[Supervised]) -> None:
        """End their threads so that another program can continue. Raises BtrfsUblkError
        when one takes too long."""
        for device in devices:
            device.is_to_park = True
            device.requests.ask(Replace)
        deadline_s = time.monotonic() + _PARK_TIMEOUT_S
        for device in devices:
            device.thread.join(max(0.0, deadline_s - time.monotonic()))
        busy = [x.directory.name for x in devices if x.thread.is_alive()]
        if busy:
            raise BtrfsUblkError(f"busy after {_PARK_TIMEOUT_S:g} s: {', '.join(busy)}")

    def _execute(self, devices: list[Supervised]) -> None:
        """Execute the other program. Raises OSError."""
        log.info("replaced by %s", self._python)
        file = os.memfd_create("devices", os.MFD_CLOEXEC)
        kept = [file, self._lock.fileno(), self._listener.fileno()]
        for device in devices:
            kept += [device.lock.fileno(), *(device.parked or [])]
        try:
            os.write(file, json.dumps([record_of(x) for x in devices]).encode())
            for fd in kept:
                os.set_inheritable(fd, True)
            managed, variables = [], dict(os.environ)
            if self._manager is not None:
                managed = ["--managed"]
                variables |= self._manager.variables
            os.execve(
                self._python,
                [
                    *(*daemon_command(self._python), *managed),
                    *(f"--lock={self._lock.fileno()}", f"--devices={file}"),
                    *(f"--listen={self._listener.fileno()}", str(self._place.path)),
                ],
                variables,
            )
        finally:
            for fd in kept:
                os.set_inheritable(fd, False)
            os.close(file)


def _parsed(message: bytes) -> dict[str, Any]:
    """Raises UsageError."""
    try:
        request = json.loads(message)
        request["request"].lower()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"no request: {error!r}", hint='send JSON: {"request": "list"}'
        ) from None
    return dict(request)


def _check_peer(connection: socket.socket, request: Mapping[str, Any]) -> None:
    """Let others than root and our own user, if the socket's mode lets them connect,
    ask of volumes only, and only of those in the usual directory."""
    size = struct.calcsize("3i")
    options = (socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(*options))
    if uid in (0, os.geteuid()):
        return
    if request["request"] not in VOLUME_REQUESTS or "base" in request:
        raise UsageError(f"user {uid} may not ask this", hint="ask as root")


def record_of(device: Supervised) -> dict[str, Any]:
    """Return what another program needs to supervise the device."""
    return {
        "directory": str(device.directory.path),
        "lock": device.lock.fileno(),
        "inherited": device.parked,
        "environment": device.environment,
    }


def _name_in_store(directory: DeviceDirectory) -> str:
    """Return the name of a device in systemd's store. Another device of the same name
    has another tag. Raises BtrfsUblkError."""
    return f"{directory.name}/{directory.spec().tag}"


def _forget_removed(manager: ServiceManager) -> None:
    """Have systemd close what it stores of devices that were removed meanwhile."""
    for name in list(manager.passed):
        with suppress(BtrfsUblkError):  # A device with damaged files is still there.
            directory = device_directory(name.partition("/")[0])
            if not directory.path.exists() or _name_in_store(directory) != name:
                StoredFds(manager, name).drop()


def _passed_listener(manager: ServiceManager) -> int | None:
    """Return the socket that systemd listens on, if it passed one. The names of all
    else that it passes have a slash."""
    for name in manager.passed:
        if "/" not in name:
            return manager.passed.pop(name)
    return None


def _talk_to(log_file: Path, *, is_managed: bool) -> None:
    """Log to the file; with ``is_managed``, to the present stderr as well."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    talk = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for target, source in ((0, null), (1, null), (2, talk)):
        if target != 2 or not is_managed:
            os.dup2(source, target)
    os.close(null)
    os.close(talk)
    logbook = Logbook(log_file)
    logbook.trim()
    log.handlers[:] = [logbook.handler(thread="MainThread")]
    if is_managed:
        journal = logging.StreamHandler()
        journal.setFormatter(logging.Formatter("%(threadName)s: %(message)s"))
        log.addHandler(journal)
    log.setLevel(logging.INFO)
    log.propagate = False


def _be_able_to_hold_many() -> None:
    """Allow descriptors for many devices, and little memory for each thread."""
    threading.stack_size(_STACK_BYTES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def _leave_no_core_dump() -> None:
    """Environments of servers may have secrets, which we have, too. NB: 1 byte, since
    the kernel hands a dump to a program also where the limit is 0."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    with suppress(ValueError):  # It is 0 already.
        resource.setrlimit(resource.RLIMIT_CORE, (1, most))


def main() -> int:
    """Run as the module's docstring says."""
    pairs = [word[2:].partition("=") for word in sys.argv[1:] if word[:2] == "--"]
    options = {name: value for name, _, value in pairs}
    if "check" in options:
        return 0  # All imports have succeeded.
    (path,) = (word for word in sys.argv[1:] if word[:2] != "--")
    place = DaemonDirectory(Path(path))
    fds = {name: int(options[name]) for name in _DESCRIPTORS if name in options}
    # NB: if no systemd runs us, the variables are for the process that started us.
    manager = ServiceManager(os.environ)
    if "managed" in options and "listen" not in fds:
        passed = _passed_listener(manager)
        if passed is not None:
            fds["listen"] = passed
    before: list[dict[str, Any]] = []
    if "devices" in fds:
        with os.fdopen(fds.pop("devices")) as file:
            file.seek(0)
            before = json.load(file)
    else:
        # NB: a keeper that started us has more, which are for one device.
        close_all_but({*fds.values(), *manager.passed.values()})
    for fd in fds.values():
        os.set_inheritable(fd, False)
    _talk_to(place.log, is_managed="managed" in options)
    # NB: the variable may have been relative to the directory that we were started in.
    os.environ[RUN_VARIABLE] = str(place.path.parent)
    _be_able_to_hold_many()
    _leave_no_core_dump()
    stay_in_memory()
    lock = Lock(fds["lock"])
    if "listen" in fds:
        listener = socket.socket(fileno=fds["listen"])
    else:
        listener = place.listening_socket()
    with requests_by_signals() as asked:
        try:
            daemon = Daemon(
                *(place, lock, listener, asked),
                manager if "managed" in options else None,
            )
            status = daemon.run(before)
        except Exception:
            log.exception("the daemon failed")  # A keeper starts another daemon.
            status = 1
    logging.shutdown()
    # Python's own exit would wait for threads, which may hang in the kernel.
    os._exit(status)
