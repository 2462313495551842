"""The process that brings up a device's next server when one has died.

It is no owner: when it dies, the server serves on, and the next supervisor adopts it.
All that it knows is in the device's directory. It waits in poll(2) only, and reads no
file that the device may back once the device is there (endurance.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from btrfs_ublk.device import control
from btrfs_ublk.device.endurance import pin_program_of
from btrfs_ublk.device.front_ends import front_end_of
from btrfs_ublk.device.locks import holder_of, lock_file
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.notify import notify
from btrfs_ublk.device.requests import Detach, Requests
from btrfs_ublk.device.running import RunningServer
from btrfs_ublk.device.state import DeviceDirectory, Status
from btrfs_ublk.errors import BtrfsUblkError, error_of_status
from btrfs_ublk.helpers import SERVER, helper_path
from btrfs_ublk.log import log
from btrfs_ublk.process import ProcessIdentity, launch
from btrfs_ublk.server.control import ControlError, Message

READY_TIMEOUT_S = 30.0
#: A server that takes a device over first waits for the driver to notice the death of
#: the one before. NB: longer than DEATH_WAIT_MS in ublk_recovery.c.
_TAKEOVER_TIMEOUT_S = 40.0 + READY_TIMEOUT_S
#: What lets go of the server's lock is the end of a process; that may take as long.
_SERVER_LOCK_TIMEOUT_S = 10.0
#: For a server that has been asked to hand its device over.
_HANDOVER_TIMEOUT_S = 30.0
#: A server that lived shorter than this has failed, however it ended.
_QUICK_END_S = 0.5
#: So many failures in a row are nothing yet; then each is waited for longer.
_FREE_FAILURES = 5
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 30.0
_FOREVER_S = 1e6
#: Of a thread that does nothing but wait; all of it is locked into memory.
_STACK_BYTES = 256 << 10


class Supervisor:
    """Of one device, whose lock the caller holds.

    ``inherited``: keep_open_fds of the program that was in our place before.
    """

    def __init__(
        self,
        directory: DeviceDirectory,
        asked: Requests,
        logbook: Logbook,
        inherited: Sequence[int] = (),
    ) -> None:
        self._directory = directory
        self._asked = asked
        self._logbook = logbook
        self._spec = directory.spec()
        self._state = directory.state()
        self._front_end = front_end_of(self._spec, self._state, inherited)
        self._program = self._choose_program()
        self._server: RunningServer | None = None
        self._served_since_s = 0.0
        self._was_lost = False

    @property
    def keep_open_fds(self) -> list[int]:
        """For the program that comes in our place."""
        return self._front_end.keep_open_fds

    def run(self) -> int:
        """Until TERM (0), or there is nothing more to be done: the state says why, and
        the exit status whether another try may help (as errors.py has it: 1; 2 or 3 if
        not). Raises Replace after HUP: the caller puts another program in our place.
        """
        self._was_lost = self._state.status == "lost"
        self._note(status="starting", supervisor=ProcessIdentity.of_self())
        try:
            self._server = self._adopt()
            if self._server and self._state.generation != self._spec.generation:
                self._upgrade(self._server)
            while True:
                if self._server is None and not self._bring_up():
                    return self._state.exit_status
                assert self._server is not None
                if not self._after_end(self._server, self._watch(self._server)):
                    return 1
        except Detach:
            log.info("asked to end: the server serves on")
            notify("STOPPING=1")
            self._note(supervisor=None)
            return 0

    # What is written down

    def _note(self, **changes: Any) -> None:
        if changes.get("status", self._state.status) != self._state.status:
            changes["since_s"] = time.time()
        self._state = self._state.but(**changes)
        try:
            self._directory.write_state(self._state)
        except BtrfsUblkError as error:
            # NB: a full /run must not end what keeps the device alive.
            log.error("%s", error)

    def _say(self, status: Status, reason: str | None = None, **changes: Any) -> None:
        if status in ("failing", "failed", "lost"):
            log.error("%s: %s", status, reason)
        self._note(status=status, reason=reason, **changes)
        notify(f"STATUS={status}{f': {reason}' if reason else ''}".replace("\n", " "))

    # A server that runs already

    def _adopt(self) -> RunningServer | None:
        """The server that another supervisor has started, or we before we replaced our
        program; None when there is none, or it had to be killed.
        """
        try:
            server = self._find_server()
        except ProcessLookupError:
            return None
        log.info("adopt server %d", server.pid)
        try:
            self._serving(server, adopted=True)
        except BtrfsUblkError as error:
            self._dismiss(server, f"server {server.pid} is of no use: {error}")
            return None
        except BaseException:
            server.close()
            raise
        return server

    def _find_server(self) -> RunningServer:
        if self._state.server is not None:
            with suppress(ProcessLookupError):
                return RunningServer(self._state.server)
        # A supervisor died after it had started one, and before it noted that.
        return RunningServer(holder_of(self._directory.server_lock))

    # A new one

    def _bring_up(self) -> bool:
        """Start servers until one serves. False when there is no use in it."""
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
                self._say(once or "failing", str(error), exit_status=status)
                # Without its directory, nobody could ever ask it to end.
                if once is not None or not self._directory.path.exists():
                    return False

    def _delay_s(self) -> float:
        steps = self._state.failures - _FREE_FAILURES
        if steps < 0:
            return 0.0
        return float(min(_FIRST_DELAY_S * 2 ** min(steps, 30), _LONGEST_DELAY_S))

    def _start(self, *, upgrading: bool = False) -> None:
        """One server, up to where the device can be read. Raises BtrfsUblkError, with
        the server's last words.
        """
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
            # We are asked to end: it goes on, and the next supervisor adopts it.
            server.close()
            raise

    def _launch(self) -> RunningServer:
        lock = lock_file(self._directory.server_lock, timeout_s=_SERVER_LOCK_TIMEOUT_S)
        if lock is None:
            raise BtrfsUblkError(
                f"{self._directory.server_lock} is locked: another server of this "
                "device does not end",
                hint="see: btrfs-ublk device show; dmesg, when it hangs in the kernel",
            )
        try:
            with lock, control.listening_socket(self._directory.path) as listener:
                child = launch(
                    self._arguments(listener.fileno()),
                    keep_open_fds=[
                        *(listener.fileno(), lock.fileno()),
                        *self._front_end.keep_open_fds,
                    ],
                    # It outlives us.
                    death_signal=None,
                    talk=self._directory.log,
                )
                # NB: before anything else: the next supervisor must find it.
                self._note(server=child.identity)
            return RunningServer(child.identity, child)
        except OSError as error:  # a full /run, say
            raise BtrfsUblkError(f"cannot start a server: {error}") from error

    def _arguments(self, listen_fd: int) -> list[str]:
        spec = self._spec
        options = self._front_end.takeover_options()
        if options is None:
            options = self._front_end.start_options()
        return [
            *(self._program, "--front-end", spec.front_end, "--tag", spec.tag),
            *("--listen-fd", str(listen_fd)),
            *(["--realtime"] if spec.realtime else []),
            *options,
            str(self._directory.description),
        ]

    def _ready_line(self, server: RunningServer) -> Message:
        """It answers when it is ready, and not before."""
        known = self._state
        # One that is adopted may have been ready before.
        takes_over = known.device is not None and known.ready.get("pid") != server.pid
        timeout_s = _TAKEOVER_TIMEOUT_S if takes_over else READY_TIMEOUT_S
        while True:
            try:
                return control.ask(
                    self._directory.path,
                    "info",
                    timeout_s=timeout_s,
                    unless=[self._asked, server],
                )
            except control.Interrupted:
                self._asked.check()
                raise ControlError("the server ended before it was ready") from None
            except control.Busy as error:
                log.warning("%s", error)  # it is well: clients leave in time

    def _serving(
        self, server: RunningServer, *, adopted: bool = False, upgrading: bool = False
    ) -> None:
        """Wait until it is ready, and put the device on it."""
        ready = self._ready_line(server)
        with self._bounded(server):
            device = self._front_end.attach(ready, server.identity)
        pinned = pin_program_of(server.pid)
        log.info("server %d serves %s; %d bytes pinned", server.pid, device, pinned)
        self._server = server
        self._served_since_s = time.monotonic()
        is_recovery = not (adopted or upgrading or self._state.device is None)
        self._say(
            "serving",
            server=server.identity,
            program=self._state.program if adopted else self._program,
            device=str(device),
            ready=ready,
            recoveries=self._state.recoveries + is_recovery,
            upgrades=self._state.upgrades + upgrading,
            exit_status=0,
        )
        notify("READY=1")

    @contextmanager
    def _bounded(self, server: RunningServer) -> Iterator[None]:
        """What is done inside may wait for the server, in the kernel. In time, that is
        ended: by its death, and that of what we keep for the next one.
        """

        def give_up() -> None:
            log.error("server %d does not answer the kernel: killed", server.pid)
            server.kill()
            self._front_end.let_go()

        threading.stack_size(_STACK_BYTES)
        timer = threading.Timer(READY_TIMEOUT_S, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        except OSError as error:
            raise BtrfsUblkError(f"no device: {error}") from error
        finally:
            timer.cancel()

    # The end of one

    def _watch(self, server: RunningServer) -> str:
        """Until it has ended: how. One that does not answer is killed."""
        limit_s = self._spec.hang_timeout_s
        while True:
            # Asked four times as often as it may be silent in all.
            ended = self._asked.wait([server], timeout_s=limit_s / 4 or _FOREVER_S)
            self._logbook.trim()
            if ended:
                return server.how_it_ended()[1]
            if limit_s and not self._answers(server, timeout_s=limit_s * 3 / 4):
                if server.wait(0.0):
                    continue
                log.warning("server %d does not answer: killed", server.pid)
                if not server.kill():
                    return "does not answer, and hangs in the kernel, even killed"
                return f"did not answer for {limit_s:g} s, and was killed"

    def _answers(self, server: RunningServer, *, timeout_s: float) -> bool:
        try:
            control.ask(
                self._directory.path,
                "info",
                timeout_s=timeout_s,
                unless=[self._asked, server],
            )
        except control.Interrupted:
            self._asked.check()
        except control.Silent:
            return False
        except ControlError as error:
            # Whoever refuses does not hang; one that has ended is seen elsewhere.
            log.warning("%s", error)
        return True

    def _after_end(self, server: RunningServer, how: str) -> bool:
        """Whether the device is to have another server."""
        status, _ = server.how_it_ended()
        reason = f"server {server.pid} {how}"
        log.warning("%s", reason)
        server.close()
        self._server = None
        is_quick = time.monotonic() - self._served_since_s < _QUICK_END_S
        self._note(
            status="recovering",
            reason=reason,
            server=None,
            last_end=reason,
            failures=self._state.failures + 1 if is_quick else 0,
        )
        # One that ended in good order has taken its device along.
        if status == 0 or self._front_end.outlives_servers(self._state.ready):
            return True
        self._say("lost", f"{reason}, and there is no recovery")
        return False

    def _dismiss(
        self, server: RunningServer, why: str, *, patience_s: float = 0.0
    ) -> None:
        if not server.wait(patience_s):
            log.warning("%s", why)
            server.kill()
        server.how_it_ended()  # NB: a child that nobody asks stays as a zombie
        server.close()

    def _explained(
        self, server: RunningServer, error: BtrfsUblkError, words_from: int
    ) -> BtrfsUblkError:
        """The server's own words, if it ended by itself, tell more than ``error``."""
        if not server.wait(1.0):
            return error
        status, how = server.how_it_ended()
        words = self._logbook.since(words_from)
        text = f"server {how}" + "".join(f"\n  {line}" for line in words)
        return error_of_status(status)(text)

    # A newer one

    def _choose_program(self) -> str:
        if self._state.upgrade_error and self._state.program:
            return self._state.program  # the last one that worked
        return self._spec.server or str(helper_path(SERVER))

    def _upgrade(self, old: RunningServer) -> None:
        """Put a new server in the place of one that serves."""
        try:
            self._hand_over(old)
            self._server = None
            self._start(upgrading=True)
            self._note(generation=self._spec.generation, upgrade_error=None)
        except BtrfsUblkError as error:
            self._fall_back(error)

    def _fall_back(self, error: BtrfsUblkError) -> None:
        """After a failure: to the program that served before the upgrade, if any."""
        if self._state.generation == self._spec.generation:
            return
        log.error("no upgrade: %s", error)
        self._program = self._state.program or self._program
        self._note(generation=self._spec.generation, upgrade_error=str(error))

    def _hand_over(self, old: RunningServer) -> None:
        """Raises BtrfsUblkError when it serves on."""
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
                        "try again when there are fewer"
                        if isinstance(error, control.Busy)
                        else "reads would fail: unmount the device, and add it anew"
                    ),
                ) from error
            # Nothing is lost when it is killed: we have what the next one needs.
            old.kill()
        why = f"server {old.pid} does not hand over: killed"
        self._dismiss(old, why, patience_s=_HANDOVER_TIMEOUT_S)

    def _wait(self, delay_s: float) -> None:
        """Raises what is asked for meanwhile."""
        deadline_s = time.monotonic() + delay_s
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            self._asked.wait([], timeout_s=remaining_s)
        self._asked.check()
