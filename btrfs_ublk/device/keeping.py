"""Make sure that a supervisor always has a keeper, which is in its records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from btrfs_ublk.base.log import log
from btrfs_ublk.device.endurance import pin_program_of
from btrfs_ublk.device.keeper import Keeper, end_keepers, start_keeper
from btrfs_ublk.device.notify import StoredFds
from btrfs_ublk.device.state import DeviceDirectory, KeeperRecord
from btrfs_ublk.errors import BtrfsUblkError

#: So many keepers are started without a delay, one after the other: a device that has
#: none does not outlive the deaths of supervisor and server.
_FREE_STARTS = 5
#: The delay between later ones.
RETRY_S = 0.5
#: The delay after a keeper that cannot be started.
_FAILURE_DELAY_S = 30.0


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
            self._forget()
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
        self._forget(kill=True)
        end_keepers(before)
        self.keeper = keeper
        self._write([keeper.record])

    def give_up(self) -> None:
        """End the keeper that we have started: what it holds is useless now."""
        self._drop_stored()
        self._forget(kill=True)
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
            self._forget()

    def close(self) -> None:
        """Forget the keeper. It takes us for dead; the next supervisor ends it."""
        self._forget()

    def _drop_stored(self) -> None:
        if self._stored is not None:
            self._stored.drop()

    def _forget(self, *, kill: bool = False) -> None:
        if self.keeper is not None:
            self.keeper.close(kill=kill)
        self.keeper = None

    def _write(self, records: list[KeeperRecord]) -> None:
        self._records = records
        self._note(records)
