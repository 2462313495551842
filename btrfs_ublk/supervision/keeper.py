"""Start, tell and end keepers, so that a supervisor always has one in its records. A
keeper (csrc/tools/keeper.c) survives the death of both supervisor and server: it holds
the FUSE connection, and starts another supervisor.

Its supervisor holds the only write end of a pipe to it. The keeper is told to begin its
work only when it is recorded (state.json); before, it ends with its supervisor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from btrfs_ublk.base.helpers import KEEPER, helper_path
from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import RunningServer, launch
from btrfs_ublk.device.endurance import pin_program_of
from btrfs_ublk.device.notify import StoredFds
from btrfs_ublk.device.state import DeviceDirectory, DeviceState, KeeperRecord
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server.fuse_connection import fds_of_process

#: So many keepers are started without a delay, one after the other: a device that has
#: none does not outlive the deaths of supervisor and server.
_FREE_STARTS = 5
#: The delay between later ones.
RETRY_S = 0.5
#: The delay after a keeper that cannot be started.
_FAILURE_DELAY_S = 30.0


class Keeper:
    """A keeper that we have started; made by start_keeper()."""

    def __init__(
        self, process: RunningServer, pipe_fd: int, record: KeeperRecord
    ) -> None:
        self._process = process
        #: To be kept open by a program that takes our place: if it is closed, the
        #: keeper takes us for dead.
        self.pipe_fd = pipe_fd
        self.record = record

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the keeper ends."""
        return self._process.fileno()

    def has_ended(self) -> bool:
        return self._process.wait(0.0)

    def tell(self, word: Literal["go", "stay"]) -> None:
        """Say "go": work; or "stay": keep the descriptors, but start no supervisor."""
        with suppress(OSError):  # it has ended
            os.write(self.pipe_fd, word[:1].encode())

    def close(self, *, kill: bool) -> None:
        """Forget the keeper, after killing it if ``kill``."""
        if kill:
            self._process.kill()
        self._process.how_it_ended()  # NB: this reaps it, or it would be a zombie.
        self._process.close()
        os.close(self.pipe_fd)


def start_keeper(
    directory: DeviceDirectory,
    fds: Sequence[int],
    *,
    revival: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Keeper:
    """Start a keeper, which does nothing before tell("go"). ``revival`` are options and
    the command that starts another supervisor, if any. The keeper gets ``environment``,
    which is for the device's servers: environment_of() reads it. Raises BtrfsUblkError.
    """
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        child = launch(
            [
                *(helper_path(KEEPER), "--watch", str(read_fd)),
                *("--directory", str(directory.path), *revival),
            ],
            keep_open_fds=[read_fd, *fds],
            # A keeper outlives us.
            death_signal=None,
            new_session=True,
            talk=directory.log,
            env=environment,
        )
        record = KeeperRecord(
            process=child.identity, fds=list(fds), revives=bool(revival)
        )
        return Keeper(RunningServer(child.identity, child), write_fd, record)
    except BaseException as error:
        os.close(write_fd)
        if isinstance(error, OSError):
            raise BtrfsUblkError(f"cannot start a keeper: {error}") from error
        raise
    finally:
        os.close(read_fd)


def end_keepers(records: Iterable[KeeperRecord]) -> None:
    """Kill keepers. What only they hold is gone then."""
    for record in records:
        with suppress(ProcessLookupError):
            process = RunningServer(record.process)
            if not process.kill():
                log.warning(
                    "keeper %d was killed, but hangs in the kernel", process.pid
                )
            process.how_it_ended()
            process.close()


def kept_fds(records: Iterable[KeeperRecord]) -> list[int]:
    """Return copies of the descriptors of the last keeper that runs, if any."""
    for record in reversed(list(records)):
        try:
            return fds_of_process(record.process, record.fds)
        except (BtrfsUblkError, OSError) as error:
            log.info("nothing from keeper %d: %s", record.process.pid, error)
    return []


def environment_of(state: DeviceState) -> dict[str, str] | None:
    """Return the environment of the device's keeper, or else of its server; None when
    neither runs."""
    processes = [record.process for record in reversed(state.keepers)]
    for process in [*processes, *filter(None, [state.server])]:
        with suppress(OSError):
            text = os.fsdecode(Path(f"/proc/{process.pid}/environ").read_bytes())
            if process.is_alive():
                pairs = (each.partition("=") for each in text.split("\0") if each)
                return {name: value for name, _, value in pairs}
    return None


class Keeping:
    """The keeper of one device. ``records`` are the keepers that were recorded before;
    ``note`` records others. ``revival`` are a keeper's arguments; it is empty if others
    start supervisors. ``environment`` is for the device's servers. ``stored`` is where
    systemd keeps what a keeper does, if it runs us."""

    def __init__(
        self,
        directory: DeviceDirectory,
        revival: Sequence[str],
        records: list[KeeperRecord],
        note: Callable[[list[KeeperRecord]], object],
        environment: Mapping[str, str] | None,
        stored: StoredFds | None,
    ) -> None:
        self._directory = directory
        self._revival = revival
        self._records = records
        self._note = note
        self._environment = environment
        self._stored = stored
        self._not_before_s = 0.0
        #: The keeper that we have started.
        self.keeper: Keeper | None = None

    def is_of_use(self, fds: Sequence[int]) -> bool:
        """Return whether a keeper of these descriptors would have anything to do."""
        return bool(fds or self._revival)

    def keep(self, fds: list[int]) -> None:
        """Start a keeper of these descriptors, unless one runs; end earlier ones."""
        if self._stored is not None and fds:
            self._stored.keep(fds, self._environment or {})
        now_s = time.monotonic()
        if self.keeper is not None and self.keeper.has_ended():
            log.warning("keeper %d has ended", self.keeper.pid)
            self.forget()
        if self.keeper is not None:
            if self.keeper.record.fds == fds:
                return
        elif now_s < self._not_before_s:
            return
        try:
            keeper = start_keeper(
                self._directory,
                fds,
                revival=self._revival,
                environment=self._environment,
            )
        except BtrfsUblkError as error:
            log.warning("%s", error)
            self._not_before_s = now_s + _FAILURE_DELAY_S
            return
        free_s = (_FREE_STARTS - 1) * RETRY_S
        before_s = min(max(self._not_before_s, now_s - free_s), now_s)
        self._not_before_s = before_s + RETRY_S
        log.info("keeper %d holds %d descriptors", keeper.pid, len(fds))
        pin_program_of(keeper.pid)
        # NB: in this order, there is a recorded keeper that works whenever we die.
        before = self._records
        self._write([*before, keeper.record])
        keeper.tell("go")
        self.forget(kill=True)
        end_keepers(before)
        self.keeper = keeper
        self._write([keeper.record])

    def give_up(self) -> None:
        """End the keeper that we have started: what it holds is useless now."""
        self._drop_stored()
        self.forget(kill=True)
        self._not_before_s = 0.0

    def drop(self) -> None:
        """End all keepers, because there is nothing to keep."""
        self.give_up()
        if self._records:
            end_keepers(self._records)
            self._write([])

    def leave(self) -> None:
        """Let the keeper hold what it has for the next supervisor, but start none."""
        self._drop_stored()  # Commands that remove the device can only end keepers.
        if self.keeper is not None:
            self.keeper.tell("stay")
            self.forget()

    def _drop_stored(self) -> None:
        if self._stored is not None:
            self._stored.drop()

    def forget(self, *, kill: bool = False) -> None:
        """Forget the keeper. It takes us for dead; the next supervisor ends it, unless
        it is killed here, with ``kill``."""
        if self.keeper is not None:
            self.keeper.close(kill=kill)
        self.keeper = None

    def _write(self, records: list[KeeperRecord]) -> None:
        self._records = records
        self._note(records)
