"""What outlives the command that made it: entered like all else, and found again."""

from __future__ import annotations

from pathlib import Path

from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.gc import collect
from btrfs_ublk.ledger import Ledger, Outcome


class KeptLedger(Ledger):
    """A ledger that can be left: what it lists stays, until collect_kept(), or the next
    boot. Who dies before leaves it as well.
    """

    def leave(self) -> None:
        """End it. The ``with`` blocks of what is entered do nothing any more."""
        with self._lock:
            self._forget()


def collect_kept(directory: Path) -> list[Outcome]:
    """Remove what ledgers in the directory list, the youngest first; what became of it.

    Raises LeftoverError, with all that could not be removed.
    """
    outcomes = [
        outcome for report in collect(directory).ledgers for outcome in report.outcomes
    ]
    left = [outcome for outcome in outcomes if outcome.result == "left"]
    if left:
        # The first one is what the others stand under.
        reason, _, hint = (left[0].reason or str(left[0].entry)).partition("\n  hint: ")
        raise LeftoverError(reason, hint=hint or None)
    return outcomes
