"""Ledgers of resources that outlive the command that made them."""

from __future__ import annotations

import fcntl
from pathlib import Path

from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.ledger import Ledger, Outcome, open_ledgers
from btrfs_ublk.errors import LeftoverError

# NB: these know how to remove what such ledgers list; gc would import all that do.
from btrfs_ublk.kernel import loop, mount  # noqa: F401


class KeptLedger(Ledger):
    """A ledger whose resources can be kept: they stay until collect_kept() or the next
    boot. They also stay when the process dies before it calls leave().
    """

    def leave(self) -> None:
        """End the ledger; then the ``with`` blocks of its resources do nothing. It is
        unlocked explicitly, as a command that another thread starts has copies of all
        descriptors for a moment, which would keep the lock."""
        with self._lock:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._forget()


def collect_kept(directory: Path) -> list[Outcome]:
    """Remove what the ledgers in a directory list, youngest first; return the outcomes.
    Raises LeftoverError for what could not be removed.

    NB: those of this process are among them, which a signal has kept from being closed.
    """
    closed = [
        outcome
        for ledger in open_ledgers(directory)
        for outcome in ledger.close(quietly=True)
        if outcome.result != "left"
    ]
    outcomes = closed + [
        outcome for report in collect(directory).ledgers for outcome in report.outcomes
    ]
    left = [outcome for outcome in outcomes if outcome.result == "left"]
    if left:
        # The others could not be removed because of the first.
        reason, _, hint = (left[0].reason or str(left[0].entry)).partition("\n  hint: ")
        raise LeftoverError(reason, hint=hint or None)
    return outcomes
