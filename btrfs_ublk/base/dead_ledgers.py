"""Read the ledgers of dead processes, and remove what they list."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

from btrfs_ublk.base.ledger import (
    FORMAT_VERSION,
    SUFFIX,
    Details,
    Entry,
    Outcome,
    append_line,
    boot_id,
    lock_if_current,
    pid_namespace,
    sweep_entries,
)
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.base.records import dataclass

#: A dead process's ledger stays locked until the commands that it ran have ended.
LOCK_TIMEOUT_S = 10.0
_LOCK_RETRY_S = 0.02


@dataclass(frozen=True)
class AbandonedLedger:
    """A dead process's ledger.

    ``refusal`` says why nothing in it may be touched: it is of another version, it has
    no header, or its lock was held for as long as we waited (by another gc, or by a
    command of the dead process).
    """

    path: Path
    pid: int | None
    same_boot: bool
    entries: list[Entry]
    damaged_lines: int
    refusal: str | None
    _fd: int

    def sweep(self, *, dry_run: bool = False) -> list[Outcome]:
        """Remove what is listed. If nothing is left, and no line was damaged, remove
        the file as well."""
        if self.refusal is not None:
            youngest_first = reversed(self.entries)
            return [Outcome(entry, "left", self.refusal) for entry in youngest_first]
        if dry_run:
            return [Outcome(entry, "would-remove") for entry in reversed(self.entries)]
        remaining = {entry.sequence for entry in self.entries}

        def strike(entry: Entry) -> None:
            remaining.discard(entry.sequence)
            append_line(self._fd, {"strike": entry.sequence})

        # If the last line is incomplete, the next record must not be glued to it.
        os.write(self._fd, b"\n")
        outcomes = sweep_entries(self.entries, strike=strike, same_boot=self.same_boot)
        if not remaining and not self.damaged_lines:
            self.path.unlink()
        return outcomes


def abandoned_ledgers(
    directory: Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S
) -> Generator[AbandonedLedger, None, None]:
    """Yield the ledgers of dead processes, the youngest first: things in it may be on
    things in an older one. Each is locked until the next is asked for.

    Close the generator (contextlib.closing) to release the last one.
    """
    for path in sorted(directory.glob(f"*{SUFFIX}"), key=_changed_ns, reverse=True):
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # Its owner has removed it, or another gc was quicker.
        try:
            is_locked = _lock_of_the_dead(path, fd, time.monotonic() + lock_timeout_s)
            if is_locked is not None:
                yield _read(path, fd, is_locked=is_locked)
        finally:
            os.close(fd)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _lock_of_the_dead(path: Path, fd: int, deadline_s: float) -> bool | None:
    """Lock a dead process's ledger. Return True when it is locked, False when another
    process kept the lock; None when its owner lives, or the file is gone."""
    while not lock_if_current(path, fd):
        if not path.exists() or _owner_may_live(path):
            return None
        if time.monotonic() > deadline_s:
            return False
        # flock(2) has no deadline, and no event says when the lock is released.
        time.sleep(_LOCK_RETRY_S)
    return True


def _owner_may_live(path: Path) -> bool:
    header, _, _ = _parse(path)
    try:
        owner = ProcessIdentity(int(header["pid"]), int(header["start_ticks"]))
    except (KeyError, TypeError, ValueError):
        return True  # It is locked and has no header, so it is just being made.
    # In our namespace, the pid of another one means another process, or none.
    return header.get("pid_namespace") != pid_namespace() or owner.is_alive()


def _read(path: Path, fd: int, *, is_locked: bool) -> AbandonedLedger:
    header, entries, damaged = _parse(path)
    pid = header.get("pid")
    refusal = None
    # An empty file is valid: its owner was killed before it wrote the header.
    if (entries or damaged or header) and not _is_understood(header):
        damaged += 1
        refusal = (
            f"its ledger does not begin with a header of version {FORMAT_VERSION}: "
            "a newer version may have made it"
        )
    elif not is_locked:
        refusal = f"another gc, or a command of the dead process {pid}, has locked it"
    return AbandonedLedger(
        path=path,
        pid=pid,
        same_boot=header.get("boot_id") == boot_id(),
        entries=entries,
        damaged_lines=damaged,
        refusal=refusal,
        _fd=fd,
    )


def _is_understood(header: Details) -> bool:
    # NB: without the boot id, every resource of the kernel would be taken for gone.
    return header.get("version") == FORMAT_VERSION and isinstance(
        header.get("boot_id"), str
    )


def _parse(path: Path) -> tuple[Details, list[Entry], int]:
    """Return header, entries that are not struck out, and the number of invalid lines.

    An incomplete last line is ignored: the thing that it was to enter was never made.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    header: Details = {}
    entries: dict[int, Entry] = {}
    damaged = 0
    lines = filter(None, text.rpartition("\n")[0].split("\n"))
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
            if number == 0 and "version" in record:
                header = record
            elif "enter" in record:
                entries[record["enter"]] = Entry(
                    record["enter"], record["kind"], record["tag"], record["details"]
                )
            elif "amend" in record:
                entries[record["amend"]].details.update(record["details"])
            else:
                entries.pop(record["strike"])
        except (ValueError, KeyError, TypeError, AttributeError):
            damaged += 1
    return header, list(entries.values()), damaged
