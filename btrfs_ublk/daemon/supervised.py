"""Supervise one device of the daemon, in a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from btrfs_ublk.base.log import log
from btrfs_ublk.device.keeper import environment_of, kept_fds
from btrfs_ublk.device.locks import Lock
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.notify import StoredFds
from btrfs_ublk.device.requests import Detach, Replace, Requests
from btrfs_ublk.device.state import DeviceDirectory
from btrfs_ublk.device.supervisor import Supervisor
from btrfs_ublk.errors import BtrfsUblkError

#: The delays before a supervisor is started again that has failed.
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 30.0


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
