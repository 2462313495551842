"""Remove what killed processes left: what their ledgers list, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from btrfs_ublk.base.dead_ledgers import LOCK_TIMEOUT_S, abandoned_ledgers
from btrfs_ublk.base.ledger import Entry, Outcome, knows, state_directory
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred

#: Packages whose modules make things, and know how to remove them.
_MAKERS = ("btrfs_ublk.kernel", "btrfs_ublk.server", "btrfs_ublk.bench.resources")


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
        """Whether nothing is left that gc should have removed."""
        return not any(
            ledger.damaged_lines
            or any(outcome.result == "left" for outcome in ledger.outcomes)
            for ledger in self.ledgers
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
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
    """Remove what the ledgers of dead processes still list, the youngest things first.

    ``directory`` defaults to the state directory. Each thing is removed only if it is
    still the one that was entered. Two runs at once do not disturb each other: a ledger
    is locked while it is worked on. A command that a dead process ran (modprobe(8),
    say) keeps it locked until it has ended; ``lock_timeout_s`` bounds that wait.
    What cannot be removed stays in its ledger. A ledger that is not understood (of
    another version, say) is reported and left as it is. ``dry_run`` only lists what
    would be removed.
    """
    reports = []
    with closing(
        abandoned_ledgers(directory or state_directory(), lock_timeout_s=lock_timeout_s)
    ) as ledgers:
        for ledger in ledgers:
            learn_kinds(ledger.entries)
            outcomes = ledger.sweep(dry_run=dry_run)
            reports.append(
                LedgerReport(ledger.path, ledger.pid, outcomes, ledger.damaged_lines)
            )
    return Report(reports)


def learn_kinds(entries: Iterable[Entry]) -> None:
    """Import all modules that make things, unless these entries' kinds are known."""
    if all(knows(entry.kind) for entry in entries):
        return
    with deferred():
        from pkgutil import iter_modules  # Dead ledgers are rare.

        for package in _MAKERS:
            for module in iter_modules(import_module(package).__path__, f"{package}."):
                import_module(module.name)
