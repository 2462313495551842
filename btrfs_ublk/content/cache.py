"""Administration of a local cache of fetched units (docs/cache.md).

Only the helper ``btrfs-ublk-cache`` knows the format of the files. All this works while
servers use the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from btrfs_ublk.base.helpers import CACHE, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError, UsageError

DEFAULT_DIRECTORY = Path("/var/cache/btrfs-ublk")
#: Emptying a large cache takes as long as its disk needs.
TIMEOUT_S = 600.0
DIGEST_BYTES = 32
#: The length of a command line is limited (execve(2), E2BIG).
_UNITS_AT_ONCE = 10_000
#: How the map file keeps digests: csrc/content/store/internal.h.
_DIGESTS_PER_PAGE = 126
_DIGEST_PAGE_BITS = 32
_USAGE = 2
#: An attempt fails if a checkpoint occurs, which is every thousand pages or so.
_COPY_ATTEMPTS = 20
#: The header contains the salts: sqlite.org/fileformat2.html, "WAL Header Format".
_LOG_HEADER_BYTES = 32

#: The digest of a unit, where it is known.
DigestOf = Callable[[int], bytes | None]


@dataclass(frozen=True)
class Content:
    """One content of a cache; sizes in bytes. ``last_use_s`` is when it was last read
    or written, in seconds since the epoch, as far as the file system records that."""

    key: str
    size: int
    unit_bytes: int
    units: int
    cached_units: int
    cached_bytes: int
    pinned: bool
    in_use: bool
    last_use_s: int

    def unit_length(self, unit: int) -> int:
        """The length of a unit in bytes; the last one may be shorter."""
        return min(self.unit_bytes, self.size - unit * self.unit_bytes)


@dataclass(frozen=True)
class Broken:
    """Damaged files, which a server discards when it needs the content."""

    key: str
    error: str


@dataclass(frozen=True)
class Status:
    """The contents of the directory; ``cached_bytes`` is the sum of all."""

    directory: Path
    cached_bytes: int
    free_bytes: int
    contents: tuple[Content, ...]
    broken: tuple[Broken, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to what JSON can hold."""
        return asdict(self) | {"directory": str(self.directory)}


@dataclass(frozen=True)
class Verification:
    """Numbers of units. ``unknown`` units have no digest, but match their checksums.
    ``wrong`` lists those that were dropped, as (key, unit)."""

    right: int
    unknown: int
    wrong: tuple[tuple[str, int], ...]
    broken: tuple[Broken, ...]

    @property
    def clean(self) -> bool:
        return not self.wrong and not self.broken

    def to_dict(self) -> dict[str, Any]:
        """Convert to what JSON can hold."""
        return asdict(self) | {"clean": self.clean}


class Cache:
    """The cache in ``directory``. Each method raises UsageError (no such cache or
    content) or BtrfsUblkError, with what the helper says.
    """

    def __init__(self, directory: Path = DEFAULT_DIRECTORY) -> None:
        self.directory = directory

    def _ask(self, *words: str | int) -> Any:
        argv: list[str | Path] = [helper_path(CACHE), self.directory, *map(str, words)]
        done = run(argv, timeout_s=TIMEOUT_S, ok_statuses=(0, 1, _USAGE))
        if done.returncode:
            message, _, hint = done.stderr.strip().partition("\n  hint: ")
            message = message.rpartition(f"{CACHE}: error: ")[2]
            kind = UsageError if done.returncode == _USAGE else BtrfsUblkError
            raise kind(message, hint=hint or None)
        return json.loads(done.stdout)

    def status(self) -> Status:
        """List all contents, the largest ones first."""
        answer = self._ask("status")
        found = answer["contents"]
        contents = [Content(**about) for about in found if "error" not in about]
        return Status(
            self.directory,
            answer["bytes"],
            answer["free_bytes"],
            tuple(sorted(contents, key=lambda one: (-one.cached_bytes, one.key))),
            tuple(Broken(**about) for about in found if "error" in about),
        )

    def units(self, key: str) -> list[int]:
        """List the cached units of a content."""
        ranges = self._ask("units", key)["ranges"]
        return [unit for first, last in ranges for unit in range(first, last + 1)]

    def drop(self, key: str, units: Iterable[int]) -> None:
        """Remove units."""
        wanted = list(units)
        for at in range(0, len(wanted), _UNITS_AT_ONCE):
            self._ask("drop", key, *wanted[at : at + _UNITS_AT_ONCE])

    def shrink(self, size_bytes: int) -> int:
        """Evict the least wanted units until at most ``size_bytes`` are left. Pinned
        contents stay. Returns the number of evicted bytes."""
        return int(self._ask("shrink", size_bytes)["evicted_bytes"])

    def limit(self, *, max_bytes: int, reserve_bytes: int | None) -> None:
        """Set the limits of all servers, which take effect within seconds: the cap on
        all contents (0: none), and what is left free on the file system (0: a twentieth
        of it; None: no change)."""
        self._ask("limit", max_bytes, "-" if reserve_bytes is None else reserve_bytes)
        if max_bytes:
            self.shrink(max_bytes)

    def remove(self, key: str) -> int:
        """Remove a whole content, and return its bytes. A pinned one is an error."""
        return int(self._ask("remove", key)["evicted_bytes"])

    def pin(self, key: str) -> None:
        """Protect a content from eviction. It need not be cached yet."""
        self._ask("pin", key)

    def unpin(self, key: str) -> None:
        """Allow the content to be evicted again."""
        self._ask("unpin", key)

    def remove_older(self, age_s: float, *, now_s: float) -> dict[str, int]:
        """Remove contents that are not pinned, and were not used for ``age_s`` seconds.
        Returns the bytes of each. Contents that are pinned or removed meanwhile are
        skipped."""

        def unpinned() -> list[Content]:
            return [one for one in self.status().contents if not one.pinned]

        removed = {}
        for content in unpinned():
            if now_s - content.last_use_s > age_s:
                try:
                    removed[content.key] = self.remove(content.key)
                except BtrfsUblkError:
                    if content.key in {one.key for one in unpinned()}:
                        raise
        return removed

    def verify(
        self,
        digests: Mapping[str, DigestOf],
        *,
        progress: Callable[[int], None] = lambda units: None,
    ) -> Verification:
        """Compare units with ``digests``, by key, or with their checksums where they
        have none, and drop those that differ. ``progress`` is called with the number of
        units since the last call.

        A unit that is evicted meanwhile may look wrong; dropping it does no harm, and
        it is not counted.
        """
        status = self.status()
        right = unknown = 0
        wrong = []
        for content in status.contents:
            digest_of = digests.get(content.key, _unknown)
            try:
                compared, others, suspects = self._compare(content, digest_of, progress)
                if others:
                    rotten = others.intersection(
                        self._ask("check", content.key)["rotten"]
                    )
                    suspects |= rotten
                    others -= rotten
                still_there = sorted(suspects.intersection(self.units(content.key)))
                if still_there:
                    self.drop(content.key, still_there)
            except (FileNotFoundError, UsageError):
                continue  # it was removed meanwhile
            right += compared
            unknown += len(others)
            wrong += [(content.key, unit) for unit in still_there]
        return Verification(right, unknown, tuple(wrong), status.broken)

    def _compare(
        self, content: Content, digest_of: DigestOf, progress: Callable[[int], None]
    ) -> tuple[int, set[int], set[int]]:
        """Return how many units are right, which have no digest, and which differ."""
        right = 0
        unknown, suspects = set(), set()
        # NB: O_NOATIME, so that remove_older() does not count this as a use.
        path = self.directory / f"{content.key}.data"
        fd = os.open(path, os.O_RDONLY | os.O_NOATIME | os.O_NOFOLLOW)
        try:
            for unit in self.units(content.key):
                expected = digest_of(unit)
                if expected is None:
                    unknown.add(unit)
                elif _digest(fd, content, unit) == expected:
                    right += 1
                else:
                    suspects.add(unit)
                progress(1)
        finally:
            os.close(fd)
        return right, unknown, suspects


def _digest(fd: int, content: Content, unit: int) -> bytes:
    length = content.unit_length(unit)
    return hashlib.sha256(os.pread(fd, length, unit * content.unit_bytes)).digest()


def _unknown(unit: int) -> bytes | None:
    return None


@contextmanager
def map_digests(path: Path) -> Iterator[dict[str, DigestOf]]:
    """Yield the digests in a map file by key, given or pinned. Reads a copy, since a
    server locks the file that it has open. Raises UsageError when it cannot be read,
    BtrfsUblkError when it kept changing while it was copied.
    """
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "map"
        _copy_map(path, copy)
        with closing(sqlite3.connect(copy)) as connection:
            try:
                yield _digests_by_key(connection)
            except sqlite3.Error as error:
                raise UsageError(f"cannot read map '{path}': {error}") from error


def _copy_map(path: Path, copy: Path) -> None:
    """Copy the file and its write-ahead log as of one moment."""
    log, log_copy = Path(f"{path}-wal"), Path(f"{copy}-wal")

    # Only checkpoints write to the file. Commits append to the log, until it restarts
    # after a checkpoint with other salts in its header. So if neither file nor header
    # has changed, the log, which is copied last, has all commits that the file lacks. A
    # torn end of the log has wrong checksums, or no commit after it, and SQLite drops
    # it.
    def state() -> tuple[int, int, bytes]:
        status = path.stat()
        return status.st_size, status.st_mtime_ns, _log_header(log)

    try:
        for _ in range(_COPY_ATTEMPTS):
            before = state()
            shutil.copyfile(path, copy)
            log_copy.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                shutil.copyfile(log, log_copy)
            if state() == before:
                return
    except FileNotFoundError as error:
        raise UsageError(f"there is no map '{path}'") from error
    except OSError as error:
        raise UsageError(f"cannot read map '{path}': {error.strerror}") from error
    raise BtrfsUblkError(
        f"map '{path}' is written to all the time",
        hint="try again when less is read for the first time",
    )


def _log_header(log: Path) -> bytes:
    try:
        with log.open("rb") as file:
            return file.read(_LOG_HEADER_BYTES)
    except FileNotFoundError:
        return b""


def _digests_by_key(connection: sqlite3.Connection) -> dict[str, DigestOf]:
    found: dict[str, DigestOf] = {}
    rows = connection.execute("SELECT id, key, list FROM sources").fetchall()
    for source, key, digests in rows:
        # Sources with one key have the same content: any of them will do.
        if digests is None:
            found[key.hex()] = _from_pins(connection, source, found.get(key.hex()))
        else:
            found[key.hex()] = _from_pages(connection, digests)
    return found


def _from_pages(connection: sqlite3.Connection, digests: int) -> DigestOf:
    def digest_of(unit: int) -> bytes | None:
        page = digests << _DIGEST_PAGE_BITS | unit // _DIGESTS_PER_PAGE
        row = connection.execute(
            "SELECT substr(list, ?, ?) FROM digests WHERE page = ?",
            (unit % _DIGESTS_PER_PAGE * DIGEST_BYTES + 1, DIGEST_BYTES, page),
        ).fetchone()
        return row[0] if row and len(row[0]) == DIGEST_BYTES else None

    return digest_of


def _from_pins(
    connection: sqlite3.Connection, source: int, other: DigestOf | None
) -> DigestOf:
    def digest_of(unit: int) -> bytes | None:
        row = connection.execute(
            "SELECT digest FROM pins WHERE source = ? AND unit = ?", (source, unit)
        ).fetchone()
        if row is None:
            return other(unit) if other else None
        return bytes(row[0])

    return digest_of
