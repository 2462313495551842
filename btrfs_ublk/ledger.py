"""What this process made, on disk, so that ``gc`` can remove what a killed run left.

One directory (``BTRFS_UBLK_STATE_DIR``, else /var/lib/btrfs-ublk, or /run/btrfs-ublk
where that cannot be made; mode 0700) holds one file of JSON lines per process. Its
maker keeps it locked (flock(2)) for life, so an unlocked file is a dead process's.
Lines are only appended: a header, then ``enter`` before a thing is made, ``amend`` when
more is known, ``strike`` after it is gone. Now and then the end is cut off, as far as
it tells of nothing but what is gone: one ftruncate(2), so whoever reads the file finds
it whole at each moment. What the kernel made ends with it. Temporary
directories do not, and neither do ledgers; but there is no fsync: a loss of power may
take the last lines.

A *kind* of thing is one function, registered with ``@remover``, that recognises the
thing from its entry, removes it and waits until it is gone. Leaving a ``with`` block
and ``gc`` use the same function, so it is idempotent and trusts nothing but the entry.

Things stand on each other: a mount on a loop device, that on a file in a temporary
directory. Which ones do is read from the paths in their entries. As long as a younger
thing is there, what it stands on is left, whoever takes things down and in what order:
a directory must not be emptied under a mount that turned out to be busy.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import secrets
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from btrfs_ublk.directories import make_private
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError
from btrfs_ublk.interrupts import deferred
from btrfs_ublk.log import log
from btrfs_ublk.process import ProcessIdentity

FORMAT_VERSION = 1
#: Of so much that may be gone, it is looked at whether it can be cut off.
_CUT_BYTES = 64 << 10
SUFFIX = ".ledger"

Details = dict[str, Any]


@dataclass
class Entry:
    """One thing: its number in the ledger, kind, random tag and what identifies it.

    ``tag`` (16 hex digits) goes into the thing itself where the kernel has room for it:
    the recognition is certain then.
    """

    sequence: int
    kind: str
    tag: str
    details: Details = field(default_factory=dict)

    def __str__(self) -> str:
        known = " ".join(f"{key}={value}" for key, value in self.details.items())
        return f"{self.kind} {known}"


#: Returns True when the thing was there and is gone now, False when it was gone before.
#: Raises LeftoverError (or any BtrfsUblkError or OSError) when it is still there.
Remover = Callable[[Entry], bool]
#: The same by an owner who knows a better way; what it returns does not matter.
Undo = Callable[[Entry], object]


#: The path at which a thing is, or None while that is not known.
Place = Callable[[Entry], str | None]


def _path_in_details(entry: Entry) -> str | None:
    return entry.details.get("path")


@dataclass(frozen=True)
class _Kind:
    remove: Remover
    survives_reboot: bool
    place: Place


_kinds: dict[str, _Kind] = {}


def remover(
    kind: str, *, survives_reboot: bool = False, place: Place = _path_in_details
) -> Callable[[Remover], Remover]:
    """Register the function that removes things of this kind.

    ``place`` says what other things' entries name when they stand on this one.
    """

    def register(function: Remover) -> Remover:
        _kinds[kind] = _Kind(function, survives_reboot, place)
        return function

    return register


def _paths(value: object) -> Iterator[str]:
    if isinstance(value, str) and value.startswith("/"):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item)


def stands_on(younger: Entry, elder: Entry) -> bool:
    """True when the younger entry names the elder's place, or what is below it."""
    kind = _kinds.get(elder.kind)
    place = kind and kind.place(elder)
    if not place or younger.sequence <= elder.sequence:
        return False
    return any(
        path == place or path.startswith(f"{place}/")
        for value in younger.details.values()
        for path in _paths(value)
    )


def _refuse_if_stood_on(elder: Entry, others: Iterable[Entry]) -> None:
    """Raise LeftoverError, naming the oldest one, when others stand on the elder."""
    for entry in others:
        if stands_on(entry, elder):
            raise LeftoverError(
                f"it is kept, as something stands on it: {entry}",
                hint="that must go first",
            )


@dataclass
class _Extent:
    """Where the lines of an entry are in the file: all of them lie in [start, end)."""

    start: int
    end: int


@dataclass(frozen=True)
class Outcome:
    """What became of one entry; ``reason`` says why a thing is left."""

    entry: Entry
    result: Literal["removed", "gone", "left", "would-remove"]
    reason: str | None = None


def boot_id() -> str:
    """Differs after every boot (random(4), /proc/sys/kernel/random/boot_id)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Where this process's pid means something (pid_namespaces(7))."""
    return os.readlink("/proc/self/ns/pid")


#: In this order. A boot empties /run, but not the temporary directories listed there.
STATE_DIRECTORIES = ("/var/lib/btrfs-ublk", "/run/btrfs-ublk")


def _made(path: Path) -> bool:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)  # False for root too on a read-only file system


def state_directory() -> Path:
    """Where ledgers live; made if missing.

    Raises BtrfsUblkError when it is not ours alone: whoever can write there chooses
    what root removes.
    """
    named = os.environ.get("BTRFS_UBLK_STATE_DIR")
    paths = [Path(named)] if named else [Path(path) for path in STATE_DIRECTORIES]
    path = next(filter(_made, paths), paths[0])
    hint = "run as root, or name a directory of yours in BTRFS_UBLK_STATE_DIR"
    return make_private(path, what="state directory", hint=hint)


class Ledger:
    """The ledger of this process: entries made, amended and struck out.

    Made on first use by ``process_ledger()``; tests make their own in a directory of
    theirs. Safe in threads. A forked child holds neither the lock nor the entries.
    """

    def __init__(self, directory: Path) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        self._extents: dict[int, _Extent] = {}
        self._last_sequence = 0
        self.path, self._fd = _create_locked(directory)
        _ledgers.add(self)
        identity = ProcessIdentity.of_self()
        self._cut_at = self._header_end = self._append(
            {
                "version": FORMAT_VERSION,
                "boot_id": boot_id(),
                "pid": identity.pid,
                "start_ticks": identity.start_ticks,
                "pid_namespace": pid_namespace(),
            }
        )

    @property
    def is_ours(self) -> bool:
        """False in a forked child, and after close()."""
        return self._fd >= 0 and self._pid == os.getpid()

    def fileno(self) -> int:
        """The locked descriptor. A child that inherits it keeps ``gc`` waiting until it
        has ended too: for commands that make what is entered here.
        """
        return self._fd

    def entries(self) -> list[Entry]:
        """What has been entered and not struck out, oldest first."""
        with self._lock:
            return list(self._entries.values())

    def enter(self, kind: str, **details: Any) -> Entry:
        """Note a thing that is about to be made."""
        with self._lock:
            self._check_ours()
            self._last_sequence += 1
            entry = Entry(self._last_sequence, kind, secrets.token_hex(8), details)
            start = os.fstat(self._fd).st_size
            end = self._append(
                {
                    "enter": entry.sequence,
                    "kind": kind,
                    "tag": entry.tag,
                    "details": details,
                }
            )
            self._entries[entry.sequence] = entry
            self._extents[entry.sequence] = _Extent(start, end)
            return entry

    def amend(self, entry: Entry, **details: Any) -> None:
        """Note more about a thing: what the kernel called it, say."""
        with self._lock:
            self._check_ours()
            end = self._append({"amend": entry.sequence, "details": details})
            if entry.sequence in self._extents:
                self._extents[entry.sequence].end = end
            entry.details.update(details)

    def strike(self, entry: Entry) -> None:
        """Note that a thing is gone; idempotent."""
        with self._lock:
            self._check_ours()
            if entry.sequence in self._entries:
                extent = self._extents[entry.sequence]
                extent.end = self._append({"strike": entry.sequence})
                del self._entries[entry.sequence]
                # Not again where it was in vain: what was there may still be kept.
                known = max(self._cut_at, self._end_of_what_is_there())
                if extent.end - known >= _CUT_BYTES:
                    self._cut()

    @contextmanager
    def holding(
        self,
        kind: str,
        *,
        undo: Undo | None = None,
        **details: Any,
    ) -> Iterator[Entry]:
        """Enter a thing, and remove and strike it out when the block is left.

        The block makes the thing. ``undo`` takes the place of the kind's remover where
        the owner knows a better way; it too must cope with a thing that was never made.
        When removal fails, the entry stays: an error that is already on its way gets a
        note, otherwise the failure is raised.
        """
        entry: Entry | None = None
        try:
            with deferred():
                entry = self.enter(kind, **details)
            yield entry
        except BaseException as error:
            if entry is not None:
                self.undo_after(error, entry, undo)
            raise
        self.undo_at_end(entry, undo)

    def undo(self, entry: Entry, undo: Undo | None = None) -> None:
        """Remove a thing and strike it out, undisturbed by signals; idempotent."""
        if not self.is_ours:
            return  # a forked child unwinds its copy of the stack: nothing here is its
        with deferred():
            _refuse_if_stood_on(entry, self.entries())
            (undo or _kinds[entry.kind].remove)(entry)
            self.strike(entry)

    def undo_at_end(self, entry: Entry, undo: Undo | None = None) -> None:
        """undo() as the last act, done also when a signal comes just before it."""
        try:
            self.undo(entry, undo)
        except Exception:
            raise
        except BaseException as interrupt:
            self.undo_after(interrupt, entry, undo)
            raise

    def undo_after(
        self, error: BaseException, entry: Entry, undo: Undo | None = None
    ) -> None:
        """undo() on the way of an error, which must not be hidden by another one."""
        try:
            try:
                self.undo(entry, undo)
            except Exception as failure:
                log.info("once more: %s", failure)
                release_frames(error)
                self.undo(entry, undo)
        except Exception as failure:
            log.warning("%s is left: %s", entry, failure)
            error.add_note(f"while cleaning up after this: {failure}")

    def sweep(self) -> list[Outcome]:
        """Remove what is still entered, the youngest first.

        The safety net: a signal may come between the last line of a ``with`` block and
        the first one of its cleanup.
        """
        with self._lock, deferred():
            if not self.is_ours or not self._entries:
                return []
            release_frames(getattr(sys, "last_value", None))
            return sweep_entries(self.entries(), strike=self.strike, same_boot=True)

    def close(self) -> list[Outcome]:
        """sweep(), then remove the file if it is empty; idempotent."""
        with self._lock, deferred():
            if not self.is_ours:
                return []
            outcomes = self.sweep()
            if not self._entries:
                with suppress(FileNotFoundError):
                    self.path.unlink()
            for outcome in outcomes:
                if outcome.result == "left":
                    log.error("left behind: %s: %s", outcome.entry, outcome.reason)
            self._forget()
            return outcomes

    def _append(self, record: Details) -> int:
        return append_line(self._fd, record)

    def _end_of_what_is_there(self) -> int:
        ends = (self._extents[number].end for number in self._entries)
        return max(self._header_end, *ends, 0)

    def _cut(self) -> None:
        """Cut off the end of the file that tells only of what was struck out there.

        NB: the strike of what was entered before must stay, or it would come back.
        """
        keep = self._end_of_what_is_there()
        # In the order of their starts, so that one pass is enough.
        for extent in self._extents.values():
            if extent.start < keep:
                keep = max(keep, extent.end)
        os.ftruncate(self._fd, keep)
        self._cut_at = keep
        self._extents = {
            number: extent
            for number, extent in self._extents.items()
            if extent.start < keep
        }

    def _check_ours(self) -> None:
        if not self.is_ours:
            raise BtrfsUblkError(
                f"ledger {self.path} belongs to process {self._pid}, not to this one",
                hint="let each forked child make its own resources",
            )

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


#: Every open ledger, so that a forked child can drop its copies of the locks.
_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()
_process_ledger: Ledger | None = None


def _after_fork_in_child() -> None:
    # NB: flock locks belong to the open file, not to the process: while a child had a
    # copy, the ledger of a dead parent would seem to be in use.
    global _process_ledger
    for ledger in list(_ledgers):
        ledger._forget()
    _process_ledger = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def process_ledger() -> Ledger:
    """This process's ledger, made on first use and swept when the process exits."""
    global _process_ledger
    if _process_ledger is None or not _process_ledger.is_ours:
        with deferred():
            _process_ledger = Ledger(state_directory())
            atexit.register(_process_ledger.close)
    return _process_ledger


def release_frames(error: BaseException | None) -> None:
    """Drop the local variables of the frames that an error has left, which its
    traceback keeps alive: an open file among them keeps a mount busy.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            frame.f_locals  # NB: before Python 3.13 a copy, renewed when looked at
        error = error.__context__


def _create_locked(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        fd = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        if lock_if_current(path, fd):
            return path, fd
        os.close(fd)  # a gc came between creation and lock and took it for abandoned


def lock_if_current(path: Path, fd: int) -> bool:
    """Lock without waiting; False when it is in use or no longer at ``path``."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def append_line(fd: int, record: Details) -> int:
    """Append a whole line or nothing; the file's new length. Raises BtrfsUblkError."""
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    end = os.fstat(fd).st_size
    reason = "it was cut off"
    try:
        if os.write(fd, line) == len(line):
            return end + len(line)
    except OSError as error:
        reason = error.strerror or str(error)
    # The next record must not be glued to half a line.
    os.ftruncate(fd, end)
    raise BtrfsUblkError(
        f"the ledger cannot be written: {reason}", hint="is the state directory full?"
    )


def sweep_entries(
    entries: list[Entry], *, strike: Callable[[Entry], None], same_boot: bool
) -> list[Outcome]:
    """Remove things in the reverse order of their making, but for those that something
    stands on which could not be removed.
    """
    outcomes: list[Outcome] = []
    for entry in reversed(entries):
        kind = _kinds.get(entry.kind)
        try:
            if kind is None:
                raise LeftoverError(
                    f"unknown kind {entry.kind!r}: made by a newer version?"
                )
            left = [outcome.entry for outcome in outcomes if outcome.result == "left"]
            _refuse_if_stood_on(entry, left)
            was_there = (same_boot or kind.survives_reboot) and kind.remove(entry)
        except (BtrfsUblkError, OSError) as error:
            outcomes.append(Outcome(entry, "left", str(error)))
        else:
            strike(entry)
            outcomes.append(Outcome(entry, "removed" if was_there else "gone"))
    return outcomes
