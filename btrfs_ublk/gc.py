"""Remove what killed runs left: what their ledgers list, and nothing else."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Imported so that the kinds of things they make are known.
import btrfs_ublk.resources  # noqa: F401
import btrfs_ublk.server  # noqa: F401
from btrfs_ublk.abandoned import LOCK_TIMEOUT_S, abandoned_ledgers
from btrfs_ublk.ledger import Outcome, state_directory


@dataclass(frozen=True)
class LedgerReport:
    """What became of one abandoned ledger's entries."""

    path: Path
    pid: int | None
    outcomes: list[Outcome]
    damaged_lines: int


@dataclass(frozen=True)
class Report:
    """What one gc run found and did."""

    ledgers: list[LedgerReport]

    @property
    def is_clean(self) -> bool:
        """True when nothing is left that gc should have removed."""
        return not any(
            ledger.damaged_lines
            or any(outcome.result == "left" for outcome in ledger.outcomes)
            for ledger in self.ledgers
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "clean": self.is_clean,
            "ledgers": [
                {
                    "path": str(ledger.path),
                    "pid": ledger.pid,
                    "damaged_lines": ledger.damaged_lines,
                    "things": [
                        {
                            "kind": outcome.entry.kind,
                            "tag": outcome.entry.tag,
                            "details": outcome.entry.details,
                            "result": outcome.result,
                            "reason": outcome.reason,
                        }
                        for outcome in ledger.outcomes
                    ],
                }
                for ledger in self.ledgers
            ],
        }


def collect(
    directory: Path | None = None,
    *,
    dry_run: bool = False,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Report:
    """Remove what the ledgers that nobody locks still list, the youngest things first.

    ``directory`` defaults to the state directory. Each thing is removed only if it is
    still the one that was entered. Two runs at once do not disturb each other: a ledger
    is locked while it is worked on. A command that a dead process ran (mount(8), say)
    keeps the ledger locked until it has ended; ``lock_timeout_s`` bounds that wait.
    What cannot be removed stays in its ledger; one that is not understood (of another
    version, say) is reported and left as it is. ``dry_run`` only lists what would be
    looked for.
    """
    reports = []
    with closing(
        abandoned_ledgers(directory or state_directory(), lock_timeout_s=lock_timeout_s)
    ) as ledgers:
        for ledger in ledgers:
            outcomes = ledger.sweep(dry_run=dry_run)
            reports.append(
                LedgerReport(ledger.path, ledger.pid, outcomes, ledger.damaged_lines)
            )
    return Report(reports)
