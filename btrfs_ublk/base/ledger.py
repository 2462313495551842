"""List on disk what this process made, so that ``gc`` can remove it after a kill.

One directory (``BTRFS_UBLK_STATE_DIR``, else /var/lib/btrfs-ublk, or /run/btrfs-ublk
where that cannot be made; mode 0700) holds one file of JSON lines per process. Its
owner keeps it locked (flock(2)) for life, so an unlocked file is a dead process's.
Lines are only appended: a header, then ``enter`` before a thing is made, ``amend`` when
more is known, ``strike`` after it is gone. From time to time, those lines at the end
that are only about things that are gone are cut off with one ftruncate(2), so a reader
always finds whole lines. Mounts and devices do not survive a reboot. Temporary
directories do, and so do ledgers outside of /run, but there is no fsync: a power cut
may lose the last lines.

Each *kind* of thing has one function, registered with ``@remover``, that recognises
the thing from its entry, removes it and waits until it is gone. The end of a ``with``
block and ``gc`` use the same one, so it is idempotent and trusts only the entry.

Things stand on each other: a mount stands on a loop device, and that on a file in a
temporary directory. The paths in the entries say so. A thing is never removed while a
younger one stands on it: a directory must not be emptied under a mount that turned out
to be busy.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import make_private
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError

FORMAT_VERSION = 1
#: The end of a file is cut off when this many bytes may be about things that are gone.
_CUT_BYTES = 64 << 10
SUFFIX = ".ledger"

Details = dict[str, Any]


@dataclass
class Entry:
    """One thing: its number in the ledger, kind, random tag and what identifies it.

    ``tag`` (16 hex digits) goes into the thing itself where the kernel has room for it,
    so that no other thing is mistaken for it.
    """

    sequence: int
    kind: str
    tag: str
    details: Details = field(default_factory=dict)

    def __str__(self) -> str:
        known = " ".join(f"{key}={value}" for key, value in self.details.items())
        return f"{self.kind} {known}"


#: Removes a thing; returns True when it was there, False when it was gone before.
#: Raises LeftoverError (or any BtrfsUblkError or OSError) when it is still there.
Remover = Callable[[Entry], bool]
#: Removes a thing in a better way, which only its owner knows. The result is ignored.
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
    reuses_places: bool


_kinds: dict[str, _Kind] = {}
#: Returns whether the module that removes things of a kind is imported.
knows = _kinds.__contains__


def remover(
    kind: str,
    *,
    survives_reboot: bool = False,
    place: Place = _path_in_details,
    reuses_places: bool = False,
) -> Callable[[Remover], Remover]:
    """Register the function that removes things of this kind.

    ``place`` returns the path that is in the entries of things that stand on this one.
    ``reuses_places``: as soon as a thing is gone, the kernel may give its place to the
    next one, before either is struck out.
    """

    def register(function: Remover) -> Remover:
        _kinds[kind] = _Kind(function, survives_reboot, place, reuses_places)
        return function

    return register


def _paths(value: object) -> Iterator[str]:
    if isinstance(value, str) and value.startswith("/"):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item)


def stands_on(younger: Entry, elder: Entry) -> bool:
    """Return whether the younger entry names the elder's place, or a path below it."""
    kind = _kinds.get(elder.kind)
    place = kind and kind.place(elder)
    if not kind or not place or younger.sequence <= elder.sequence:
        return False
    if kind.reuses_places and younger.kind == elder.kind:
        if kind.place(younger) == place:
            return False  # One of the two has gone, and had the place before.
    return any(
        path == place or path.startswith(f"{place}/")
        for value in younger.details.values()
        for path in _paths(value)
    )


def _refuse_if_stood_on(elder: Entry, others: Iterable[Entry]) -> None:
    """Raise LeftoverError, which names the first of ``others`` that stands on it."""
    for entry in others:
        if stands_on(entry, elder):
            raise LeftoverError(
                f"it is kept, because something else still uses it: {entry}",
                hint="remove that first",
            )


@dataclass
class _Extent:
    """The part of the file, [start, end), that has all lines about an entry."""

    start: int
    end: int


@dataclass(frozen=True)
class Outcome:
    """What became of one entry; ``reason`` says why a thing is left."""

    entry: Entry
    result: Literal["removed", "gone", "left", "would-remove"]
    reason: str | None = None


def boot_id() -> str:
    """Return a text that differs after every boot (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Return the namespace in which this process's pid is valid (pid_namespaces(7))."""
    return os.readlink("/proc/self/ns/pid")


#: They are tried in this order. A boot empties /run, so a ledger there is lost, but not
#: the temporary directories that it lists.
STATE_DIRECTORIES = ("/var/lib/btrfs-ublk", "/run/btrfs-ublk")


def _made(path: Path) -> bool:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    # On a read-only file system root gets False, too.
    return os.access(path, os.W_OK, effective_ids=True)


def state_directory() -> Path:
    """Return the directory of ledgers; it is made if missing.

    Raises BtrfsUblkError when it is not this user's alone: who can write there chooses
    what root removes.
    """
    named = os.environ.get("BTRFS_UBLK_STATE_DIR")
    paths = [Path(named)] if named else [Path(path) for path in STATE_DIRECTORIES]
    if not named and os.geteuid() != 0:
        # As the XDG Base Directory Specification has it.
        home = os.environ.get("XDG_STATE_HOME", "")
        if not os.path.isabs(home):
            home = os.path.expanduser("~/.local/state")
        if os.path.isabs(home):  # else nobody knows where this user is at home
            paths.append(Path(home, "btrfs-ublk"))
    path = next(filter(_made, paths), paths[0])
    hint = "run as root, or name a directory of yours in BTRFS_UBLK_STATE_DIR"
    return make_private(path, what="state directory", hint=hint)


class Ledger:
    """The ledger of this process: entries made, amended and struck out.

    ``process_ledger()`` makes it on first use; tests make their own in a directory of
    theirs. It is thread-safe. A forked child has neither the lock nor the entries.
    """

    def __init__(self, directory: Path) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        self._extents: dict[int, _Extent] = {}
        self._last_sequence = 0
        with deferred():
            self.path, self._fd = _create_locked(directory)
            _ledgers[id(self)] = self
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
        """Whether this process may use it: not in a forked child, or after close()."""
        return self._fd >= 0 and self._pid == os.getpid()

    def fileno(self) -> int:
        """Return the locked descriptor. Commands that make things entered here should
        inherit it, because ``gc`` then waits until they have ended, too."""
        return self._fd

    def entries(self) -> list[Entry]:
        """Return the entries that are not struck out, oldest first."""
        with self._lock:
            return list(self._entries.values())

    def enter(self, kind: str, **details: Any) -> Entry:
        """Note a thing that is about to be made."""
        with self._lock:
            self._check_ours()
            self._last_sequence += 1
            entry = Entry(self._last_sequence, kind, os.urandom(8).hex(), details)
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
        """Note more about a thing: the name that the kernel gave it, say."""
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
                # Count from the last attempt, even if that could cut off nothing.
                known = max(self._cut_at, self._end_of_what_is_there())
                if extent.end - known >= _CUT_BYTES:
                    self._cut()

    @contextmanager
    def holding(
        self, kind: str, *, undo: Undo | None = None, **details: Any
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
            return  # A forked child unwinds its copy of the stack, but owns nothing.
        with deferred():
            _refuse_if_stood_on(entry, self.entries())
            (undo or _kinds[entry.kind].remove)(entry)
            self.strike(entry)

    def undo_at_end(self, entry: Entry, undo: Undo | None = None) -> None:
        """Call undo() at the end of a block, even if a signal comes just before it."""
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
        """Call undo() after an error, which a failure of undo() must not hide."""
        try:
            try:
                self.undo(entry, undo)
            except Exception as failure:
                log.info("%s could not be removed, trying again: %s", entry, failure)
                release_frames(error)
                self.undo(entry, undo)
        except Exception as failure:
            log.warning("%s could not be removed: %s", entry, failure)
            error.add_note(f"while cleaning up after this: {failure}")

    def sweep(self) -> list[Outcome]:
        """Remove what is still entered, the youngest first.

        Something may be left: a signal may come between the last line of a ``with``
        block and the first one of its cleanup.
        """
        with self._lock, deferred():
            if not self.is_ours or not self._entries:
                return []
            release_frames(getattr(sys, "last_value", None))
            return sweep_entries(self.entries(), strike=self.strike, same_boot=True)

    def close(self, *, quietly: bool = False) -> list[Outcome]:
        """Call sweep(), then remove the file if no entry is left; idempotent."""
        with self._lock, deferred():
            if not self.is_ours:
                return []
            outcomes = self.sweep()
            if not self._entries:
                with suppress(FileNotFoundError):
                    self.path.unlink()
            for outcome in outcomes:
                if outcome.result == "left" and not quietly:
                    log.error("left behind: %s: %s", outcome.entry, outcome.reason)
            self._forget()
            return outcomes

    def _append(self, record: Details) -> int:
        return append_line(self._fd, record)

    def _end_of_what_is_there(self) -> int:
        ends = (self._extents[number].end for number in self._entries)
        return max(self._header_end, *ends, 0)

    def _cut(self) -> None:
        """Cut off the end of the file that is only about things that were both entered
        and struck out in it.

        NB: a strike must stay when its ``enter`` does, or the thing is listed again."""
        keep = self._end_of_what_is_there()
        # These are in the order of their starts, so one pass is enough.
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
_ledgers: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()
_process_ledger: Ledger | None = None


def open_ledgers(directory: Path) -> list[Ledger]:
    """Return this process's ledgers in a directory that are not closed yet."""
    return [x for x in _all_ledgers() if x.is_ours and x.path.parent == directory]


def _all_ledgers() -> list[Ledger]:
    # NB: a list of references is made at once, while other threads may add ledgers.
    found = [reference() for reference in _ledgers.valuerefs()]
    return [ledger for ledger in found if ledger is not None]


def _after_fork_in_child() -> None:
    # NB: flock locks belong to the open file, not to the process: while a child had a
    # copy, the ledger of a dead parent would seem to be in use.
    global _process_ledger
    for ledger in _all_ledgers():
        ledger._forget()
    _process_ledger = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def process_ledger() -> Ledger:
    """Return this process's ledger; made on first use, and swept at exit."""
    global _process_ledger
    if _process_ledger is None or not _process_ledger.is_ours:
        with deferred():
            _process_ledger = Ledger(state_directory())
            atexit.register(_process_ledger.close)
    return _process_ledger


def release_frames(error: BaseException | None) -> None:
    """Drop the local variables of the frames that an error has left. Its traceback
    keeps them alive, and an open file among them keeps a mount busy."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            frame.f_locals  # NB: before Python 3.13, this is a copy; reading renews it.
        error = error.__context__


def _create_locked(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / f"{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"
        fd = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        if lock_if_current(path, fd):
            return path, fd
        os.close(fd)  # A gc found it before it was locked, and took it for abandoned.


def lock_if_current(path: Path, fd: int) -> bool:
    """Lock without waiting; False when it is in use or no longer at ``path``."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def append_line(fd: int, record: Details) -> int:
    """Append a whole line or nothing; return the new length. Raises BtrfsUblkError."""
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    end = os.fstat(fd).st_size
    reason = "it was cut off"
    try:
        if os.write(fd, line) == len(line):
            return end + len(line)
    except OSError as error:
        reason = error.strerror or str(error)
    # The next record must not be glued to an incomplete line.
    os.ftruncate(fd, end)
    raise BtrfsUblkError(
        f"the ledger cannot be written: {reason}", hint="is the state directory full?"
    )


def sweep_entries(
    entries: list[Entry], *, strike: Callable[[Entry], None], same_boot: bool
) -> list[Outcome]:
    """Remove things, the youngest first. A thing stays if another one that could not be
    removed stands on it."""
    outcomes: list[Outcome] = []
    for entry in reversed(entries):
        kind = _kinds.get(entry.kind)
        try:
            if kind is None:
                raise LeftoverError(
                    f"its kind {entry.kind!r} is unknown: a newer version may have "
                    "made it"
                )
            left = [outcome.entry for outcome in outcomes if outcome.result == "left"]
            _refuse_if_stood_on(entry, left)
            # NB: shutil.rmtree() closes a descriptor twice when a signal raises at the
            # first time, and hides the signal by the error of the second.
            with deferred():
                was_there = (same_boot or kind.survives_reboot) and kind.remove(entry)
        except (BtrfsUblkError, OSError) as error:
            outcomes.append(Outcome(entry, "left", str(error)))
        else:
            strike(entry)
            outcomes.append(Outcome(entry, "removed" if was_there else "gone"))
    return outcomes
