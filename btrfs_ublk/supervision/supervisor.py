"""Start another server of a device whenever one has died.

A supervisor does not own the server: when the supervisor dies, the server runs on, and
the next supervisor adopts it. All that a supervisor knows is in the device's directory.
It waits only in poll(2). Once there is a device, it reads no file that may be on it
(endurance.py).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.hosts import via_option
from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import (
    ProcessIdentity,
    RunningServer,
    SupportsFileno,
    launch,
)
from btrfs_ublk.device import control
from btrfs_ublk.device.endurance import pin_program_of, stay_in_memory
from btrfs_ublk.device.front_end import LostError
from btrfs_ublk.device.front_ends import front_end_of
from btrfs_ublk.device.locks import Lock, holder_of, lock_file
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.notify import StoredFds, notify
from btrfs_ublk.device.requests import Detach, Replace, Requests, requests_by_signals
from btrfs_ublk.device.state import DeviceDirectory, Status
from btrfs_ublk.errors import BtrfsUblkError, error_of_status
from btrfs_ublk.server.control import ControlError, Message
from btrfs_ublk.supervision.keeper import RETRY_S, Keeping, kept_fds

READY_TIMEOUT_S = 30.0
#: A server that takes over a device first waits until the driver notices that the last
#: one has died. NB: this must be longer than DEATH_WAIT_MS in ublk_recovery.c.
_TAKEOVER_TIMEOUT_S = 40.0 + READY_TIMEOUT_S
#: The server's lock is released when a process ends, which may take this long.
_SERVER_LOCK_TIMEOUT_S = 10.0
#: The time for a server to hand over its device when asked.
_HANDOVER_TIMEOUT_S = 30.0
#: A server that ran for a shorter time than this has failed, however it ended.
_QUICK_END_S = 0.5
#: After this many failures in a row, each new start is delayed, longer each time.
_FREE_FAILURES = 5
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 30.0
_FOREVER_S = 1e6
_FOREGROUND = "--foreground"
#: The stack of a thread that only waits; all of it is locked into memory.
_STACK_BYTES = 256 << 10


class Supervisor:
    """The supervisor of one device, whose lock the caller holds.

    ``inherited`` are keep_open_fds of the supervisor before. ``revival`` are arguments
    with which a keeper starts another supervisor when we have died; it is empty if
    others do that. ``environment`` is for the servers; ours by default. ``stored`` is
    systemd's store, if it runs this process."""

    def __init__(
        self,
        directory: DeviceDirectory,
        asked: Requests,
        logbook: Logbook,
        inherited: Sequence[int] = (),
        revival: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        stored: StoredFds | None = None,
    ) -> None:
        self._directory = directory
        self._asked = asked
        self._logbook = logbook
        self._spec = directory.spec()
        self._state = directory.state()
        self._front_end = front_end_of(self._spec, self._state, inherited)
        self._program = self._choose_program()
        self._server: RunningServer | None = None
        self._keeping = Keeping(
            directory,
            revival,
            self._state.keepers,
            lambda records: self._note(keepers=records),
            environment,
            stored,
        )
        self._environment = environment
        self._served_since_s = 0.0
        self._was_lost = False

    @property
    def keep_open_fds(self) -> list[int]:
        """Descriptors for a program that takes our place."""
        return self._front_end.keep_open_fds

    @property
    def keeper_fds(self) -> list[int]:
        """More of them: while these are open, the keeper does not take us for dead."""
        return [self._keeping.keeper.pipe_fd] if self._keeping.keeper else []

    def close(self) -> None:
        """Let another supervisor continue, here or in a new process."""
        self._keeping.forget()
        if self._server is not None:
            self._server.close()
            self._server = None

    def end(self) -> None:
        """Close all that this process has of the device, and would keep its server's
        connection, after run() has returned: it may go on for others."""
        self.close()
        self._front_end.let_go()

    def begin(self) -> None:
        """Note that this process supervises the device; run() must follow."""
        self._was_lost = self._state.status == "lost"
        self._note(status="starting", supervisor=ProcessIdentity.of_self())

    def run(self) -> int:
        """Supervise until TERM (status 0), or until nothing more can be done: the state
        says why, and the exit status whether another try may help (as in errors.py: 1
        if so, 2 or 3 if not). Raises Replace: the caller makes the next supervisor."""
        try:
            if self._state.device is not None:
                self._have_keeper()
            self._server = self._adopt()
            if self._server and self._state.generation != self._spec.generation:
                self._upgrade(self._server)
            while True:
                if self._server is None and not self._bring_up():
                    self._keeping.drop()
                    return self._state.exit_status
                assert self._server is not None
                if not self._after_end(self._server, self._watch(self._server)):
                    self._keeping.drop()
                    return 1
        except Detach:
            log.info("asked to end: the server serves on")
            notify("STOPPING=1")
            self._leave_keeper()
            self._note(supervisor=None)
            return 0

    # Writing the state

    def _note(self, **changes: Any) -> None:
        if changes.get("status", self._state.status) != self._state.status:
            changes["since_s"] = time.time()
        self._state = self._state.but(**changes)
        try:
            self._directory.write_state(self._state)
        except BtrfsUblkError as error:
            # NB: a full /run must not end the process that keeps the device alive.
            log.error("%s", error)

    def _say(self, status: Status, reason: str | None = None, **changes: Any) -> None:
        if status in ("failing", "failed", "lost"):
            log.error("%s: %s", status, reason)
        self._note(status=status, reason=reason, **changes)
        notify(f"STATUS={status}{f': {reason}' if reason else ''}".replace("\n", " "))

    # Keepers, which outlive us

    def _have_keeper(self) -> None:
        if self._wants_keeper():
            self._keeping.keep(self._front_end.keep_open_fds)
        else:
            self._keeping.drop()

    def _wants_keeper(self) -> bool:
        has_recovery = self._front_end.outlives_servers(self._state.ready)
        return has_recovery and self._keeping.is_of_use(self._front_end.keep_open_fds)

    def _leave_keeper(self) -> None:
        if self._front_end.keep_open_fds:
            self._keeping.leave()
        else:
            self._keeping.drop()

    # Adopting a server that runs already

    def _adopt(self) -> RunningServer | None:
        """Adopt a server that another supervisor started, or we with another program;
        None when there is none, or it had to be killed."""
        try:
            server = self._find_server()
        except ProcessLookupError:
            return None
        log.info("adopt server %d", server.pid)
        try:
            self._serving(server, adopted=True)
        except BtrfsUblkError as error:
            self._dismiss(server, f"server {server.pid} cannot be used: {error}")
            return None
        except BaseException:
            server.close()
            raise
        return server

    def _find_server(self) -> RunningServer:
        if self._state.server is not None:
            with suppress(ProcessLookupError):
                return RunningServer(self._state.server)
        # The last supervisor may have died before it noted the server that it started.
        return RunningServer(holder_of(self._directory.server_lock))

    # Starting a new server

    def _bring_up(self) -> bool:
        """Start servers until one serves. Returns False when that is useless."""
        is_first = self._state.device is None
        once: Status | None = (
            "failed" if is_first else "lost" if self._was_lost else None
        )
        while True:
            self._say("starting" if is_first else "recovering", self._state.reason)
            self._wait(self._delay_s())
            try:
                self._start()
                self._was_lost = False
                if self._state.generation != self._spec.generation:
                    self._note(generation=self._spec.generation, upgrade_error=None)
                return True
            except BtrfsUblkError as error:
                self._note(failures=self._state.failures + 1, server=None)
                self._fall_back(error)
                status = error.exit_status
                if isinstance(error, LostError):
                    once = "lost"
                self._say(once or "failing", str(error), exit_status=status)
                # Without its directory, nobody could ever ask us to end.
                if once is not None or not self._directory.path.exists():
                    return False

    def _delay_s(self) -> float:
        steps = self._state.failures - _FREE_FAILURES
        if steps < 0:
            return 0.0
        return float(min(_FIRST_DELAY_S * 2 ** min(steps, 30), _LONGEST_DELAY_S))

    def _start(self, *, upgrading: bool = False) -> None:
        """Start a server, and wait until the device can be read. Raises BtrfsUblkError,
        with the end of the server's log."""
        self._logbook.trim()
        words_from = self._logbook.size()
        server = self._launch()
        try:
            self._serving(server, upgrading=upgrading)
        except BtrfsUblkError as error:
            explained = self._explained(server, error, words_from)
            self._dismiss(server, f"server {server.pid} was killed: it did not start")
            raise explained from error
        except BaseException:
            # We are asked to end. The server runs on; the next supervisor adopts it.
            server.close()
            raise

    def _launch(self) -> RunningServer:
        lock = lock_file(self._directory.server_lock, timeout_s=_SERVER_LOCK_TIMEOUT_S)
        if lock is None:
            raise BtrfsUblkError(
                f"{self._directory.server_lock} is locked: another server of this "
                "device does not end",
                hint="see: btrfs-ublk device status, and dmesg if the kernel hangs",
            )
        try:
            with lock, control.listening_socket(self._directory.path) as listener:
                child = launch(
                    self._arguments(listener.fileno()),
                    keep_open_fds=[
                        *(listener.fileno(), lock.fileno()),
                        *self._front_end.keep_open_fds,
                    ],
                    # A server outlives us.
                    death_signal=None,
                    talk=self._directory.log,
                    env=self._environment,
                )
                # NB: do this first, so that the next supervisor finds the server.
                self._note(server=child.identity)
            return RunningServer(child.identity, child)
        except OSError as error:  # a full /run, say
            raise BtrfsUblkError(f"cannot start a server: {error}") from error

    def _arguments(self, listen_fd: int) -> list[str]:
        spec = self._spec
        options = self._front_end.takeover_options()
        if options is None:
            options = self._front_end.start_options()
            # What the keeper holds is useless for a new device.
            self._keeping.give_up()
        return [
            *(self._program, "--front-end", spec.front_end, "--tag", spec.tag),
            *("--listen-fd", str(listen_fd)),
            *via_option(strict=False),
            *options,
            str(self._directory.description),
        ]

    def _info(self, server: RunningServer, *, timeout_s: float) -> Message:
        """Ask the server. Raises what we are asked for meanwhile, control.Interrupted
        when it ends, ControlError."""
        path = self._directory.path
        unless: list[SupportsFileno] = [self._asked, server]
        try:
            return control.ask(path, "info", timeout_s=timeout_s, unless=unless)
        except control.Interrupted:
            self._asked.check()
            raise

    def _ready_line(self, server: RunningServer) -> Message:
        """Return the server's ready line. It does not answer before it is ready."""
        known = self._state
        # A server that is adopted may have been ready before.
        takes_over = known.device is not None and known.ready.get("pid") != server.pid
        timeout_s = _TAKEOVER_TIMEOUT_S if takes_over else READY_TIMEOUT_S
        while True:
            try:
                return self._info(server, timeout_s=timeout_s)
            except control.Interrupted:
                raise ControlError("the server ended before it was ready") from None
            except control.Busy as error:
                log.warning("%s", error)  # The server works: some clients will leave.

    def _serving(
        self, server: RunningServer, *, adopted: bool = False, upgrading: bool = False
    ) -> None:
        """Wait until the server is ready, and make its device usable."""
        ready = self._ready_line(server)
        with self._bounded(server):
            device = self._front_end.attach(ready, server)
        pinned = pin_program_of(server.pid)
        log.info("server %d serves %s; %d bytes pinned", server.pid, device, pinned)
        self._server = server
        self._served_since_s = time.monotonic()
        is_recovery = not (adopted or upgrading or self._state.device is None)
        self._note(device=str(device), ready=ready)
        # NB: it must have a keeper before others learn that it serves.
        self._have_keeper()
        self._say(
            "serving",
            server=server.identity,
            program=self._state.program if adopted else self._program,
            recoveries=self._state.recoveries + is_recovery,
            upgrades=self._state.upgrades + upgrading,
            exit_status=0,
        )
        notify("READY=1")

    @contextmanager
    def _bounded(self, server: RunningServer) -> Iterator[None]:
        """Kill the server if the block, which may wait for it in the kernel, takes too
        long. Its death ends the wait, because nobody else has its connection yet."""

        def give_up() -> None:
            log.error("server %d does not answer the kernel: it is killed", server.pid)
            server.kill()

        threading.stack_size(_STACK_BYTES)
        timer = threading.Timer(READY_TIMEOUT_S, give_up)
        timer.daemon = True
        timer.name = threading.current_thread().name  # for the log
        timer.start()
        try:
            yield
        except OSError as error:
            raise BtrfsUblkError(
                f"the device could not be attached: {error}"
            ) from error
        finally:
            timer.cancel()

    # Watching a server, and its end

    def _watch(self, server: RunningServer) -> str:
        """Wait until the server has ended, and return how; kill one that hangs."""
        limit_s = self._spec.hang_timeout_s
        while True:
            keeper, wanted = self._keeping.keeper, self._wants_keeper()
            # Ask it four times in the time for which it may be silent.
            timeout_s = limit_s / 4 or _FOREVER_S
            ended = self._asked.wait(
                [server, *([keeper] if keeper else [])],
                timeout_s=RETRY_S if wanted and not keeper else timeout_s,
            )
            self._logbook.trim()
            if server.fileno() in ended:
                return server.how_it_ended()[1]
            if wanted and (ended or not keeper):
                self._have_keeper()
                continue
            if limit_s and not self._answers(server, timeout_s=limit_s * 3 / 4):
                if server.wait(0.0):
                    continue
                log.warning("server %d does not answer: it is killed", server.pid)
                if not server.kill():
                    return (
                        "did not answer, and hangs in the kernel though it was killed"
                    )
                return f"did not answer for {limit_s:g} s, and was killed"

    def _answers(self, server: RunningServer, *, timeout_s: float) -> bool:
        try:
            self._info(server, timeout_s=timeout_s)
        except control.Interrupted:
            pass
        except control.Silent:
            return False
        except ControlError as error:
            # A server that refuses does not hang. One that has ended is seen elsewhere.
            log.warning("%s", error)
        return True

    def _after_end(self, server: RunningServer, how: str) -> bool:
        """Note the end of a server; return whether to start another one."""
        status, _ = server.how_it_ended()
        reason = f"server {server.pid} {how}"
        log.warning("%s", reason)
        server.close()
        self._server = None
        is_quick = time.monotonic() - self._served_since_s < _QUICK_END_S
        self._have_keeper()
        self._note(
            status="recovering",
            reason=reason,
            server=None,
            last_end=reason,
            failures=self._state.failures + 1 if is_quick else 0,
        )
        # A server that ended in order has removed its device; another makes a new one.
        if status == 0 or self._front_end.outlives_servers(self._state.ready):
            return True
        self._say("lost", f"{reason}, and the device has no recovery mode")
        return False

    def _dismiss(
        self, server: RunningServer, why: str, *, patience_s: float = 0.0
    ) -> None:
        if not server.wait(patience_s):
            log.warning("%s", why)
            server.kill()
        server.how_it_ended()  # NB: this reaps it, or it would be a zombie.
        server.close()

    def _explained(
        self, server: RunningServer, error: BtrfsUblkError, words_from: int
    ) -> BtrfsUblkError:
        """Return an error with the server's own messages, if it ended by itself."""
        if not server.wait(1.0):
            return error
        status, how = server.how_it_ended()
        words = self._logbook.since(words_from)
        text = f"server {how}" + "".join(f"\n  {line}" for line in words)
        return error_of_status(status)(text)

    # Replacing a server by a newer one

    def _choose_program(self) -> str:
        state = self._state
        failed = state.upgrade_error and state.generation == self._spec.generation
        last_that_worked = state.program if failed else None
        return last_that_worked or self._spec.server or str(helper_path(SERVER))

    def _upgrade(self, old: RunningServer) -> None:
        """Replace a server that runs by a new one."""
        try:
            self._hand_over(old)
            self._server = None
            self._start(upgrading=True)
            self._note(generation=self._spec.generation, upgrade_error=None)
        except BtrfsUblkError as error:
            if self._server is None:
                # NB: before commands learn that it failed, and take it for serving.
                self._note(status="recovering", server=None)
            self._fall_back(error)

    def _fall_back(self, error: BtrfsUblkError) -> None:
        """After a failed upgrade, return to the program that served before it."""
        if self._state.generation == self._spec.generation:
            return
        log.error("the upgrade failed: %s", error)
        self._program = self._state.program or self._program
        self._note(generation=self._spec.generation, upgrade_error=str(error))

    def _hand_over(self, old: RunningServer) -> None:
        """End a server, but not its device. Raises BtrfsUblkError when it runs on."""
        try:
            self._front_end.check_handover()
        except BtrfsUblkError as error:
            raise BtrfsUblkError(
                f"server {old.pid} cannot hand over: {error.message}", hint=error.hint
            ) from error
        log.info("server %d is asked to hand over", old.pid)
        try:
            control.ask(
                self._directory.path,
                "handover",
                timeout_s=_HANDOVER_TIMEOUT_S,
                unless=[old],
            )
        except control.Interrupted:
            pass  # it has ended
        except ControlError as error:
            hangs = isinstance(error, control.Silent)
            if not hangs or self._state.ready.get("recovery") != "reissue":
                raise BtrfsUblkError(
                    f"server {old.pid} cannot hand over: {error}",
                    hint=(
                        "try again when fewer clients are connected"
                        if isinstance(error, control.Busy)
                        else "reads would fail: unmount the device, and make it again"
                    ),
                ) from error
            # Killing it loses nothing: we have what the next one needs.
            old.kill()
        why = f"server {old.pid} did not hand over, and was killed"
        self._dismiss(old, why, patience_s=_HANDOVER_TIMEOUT_S)

    def _wait(self, delay_s: float) -> None:
        """Wait. Raises what is asked for meanwhile."""
        deadline_s = time.monotonic() + delay_s
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            self._asked.wait([], timeout_s=remaining_s)
        self._asked.check()


def supervise(
    directory: DeviceDirectory, lock: Lock, *, inherited: Sequence[int] = ()
) -> int:
    """Supervise one device in this process, for service managers of others, until TERM
    or INT, which leave the server running; return an exit status. Messages go to stderr
    as well as to the device's log.

    ``lock`` is the directory's. ``inherited`` are descriptors that another program in
    our place kept open."""
    logbook = Logbook(directory.log)
    log.handlers[:] = [logbook.handler(), *(log.handlers or [logging.StreamHandler()])]
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
    """Execute the interpreter and package that the device was given. The process stays
    the same, for systemd and for the lock. Returns when it is not possible."""
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


def main() -> int:
    """Continue in the place of another program, which has replaced itself:
    python -m btrfs_ublk.device.supervise --foreground DIRECTORY LOCK-FD [FD,…]"""
    path, lock_fd, *more = (word for word in sys.argv[1:] if word != _FOREGROUND)
    inherited = [int(word) for word in more[0].split(",")] if more else []
    lock = Lock(int(lock_fd))
    for fd in (lock.fileno(), *inherited):
        os.set_inheritable(fd, False)
    return supervise(DeviceDirectory(Path(path)), lock, inherited=inherited)
