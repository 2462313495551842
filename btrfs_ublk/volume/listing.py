"""What is in a directory elsewhere: below a prefix of an S3 bucket, in the index of a
web server, or in a manifest. Each is read by a module of its own.

A listing comes from somebody else. It is bounded, and a name that no file can have is
an error, so that a tree has all that was listed, or is not made.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from btrfs_ublk.content import SourceKeys
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.units import MIB

#: Of files and directories together. Each has a place in the map and in the memory of
#: its server.
MAX_ENTRIES = 200_000
MAX_DEPTH = 64
#: Of one page of a listing, and of a manifest.
MAX_PAGE_BYTES = 32 * MIB
_MAX_NAME_BYTES = 255  # NAME_MAX


@dataclass(frozen=True)
class ListedFile:
    """A file of a listing. ``source`` is what MapClient.add() takes. ``mtime_s`` is in
    seconds since 1970, None where nobody says it."""

    path: str
    source: SourceKeys
    mtime_s: float | None = None


@dataclass
class Listing:
    """The files by path, and the paths of all directories. Readers add to it, and
    complete() checks the whole. Errors are BtrfsUblkError, and name the entry."""

    origin: str
    files: dict[str, ListedFile] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)

    def add(self, path: str, source: SourceKeys, mtime_s: float | None = None) -> None:
        """Add a file. A source of size 0 becomes that of an empty file."""
        self._check(path)
        if source.get("size") == 0:
            source = {"size": 0}
        other = self.files.setdefault(path, ListedFile(path, source, mtime_s))
        if other.source != source:
            raise self.refused(path, "is there twice, with different contents")
        self._count()

    def add_directory(self, path: str) -> None:
        """Add a directory, which may be empty."""
        self._check(path)
        self.directories.add(path)
        self._count()

    def refused(self, name: str, why: str, hint: str | None = None) -> BtrfsUblkError:
        return BtrfsUblkError(
            f"{self.origin} lists {name[:200]!r}, which {why}", hint=hint
        )

    def complete(self) -> Listing:
        """Add the directories that files are in, and check that no name is both."""
        if not self.files and not self.directories:
            raise BtrfsUblkError(
                f"{self.origin} lists nothing", hint="is its name right?"
            )
        for path in [*self.files, *self.directories]:
            while path := path.rpartition("/")[0]:
                if path in self.directories:
                    break
                self.directories.add(path)
        for path in self.directories & self.files.keys():
            raise self.refused(path, "is a file, and a directory too")
        return self

    def _check(self, path: str) -> None:
        parts = path.split("/")
        if len(parts) > MAX_DEPTH:
            why = f"is more than {MAX_DEPTH} directories deep"
            hint = "does a link in it lead to a directory above itself?"
            raise self.refused(path, why, hint)
        for part in parts:
            if part in ("", ".", "..") or "\0" in part or "\n" in part:
                raise self.refused(path, "no file can be named")
            if len(os.fsencode(part)) > _MAX_NAME_BYTES:
                why = f"has a name of more than {_MAX_NAME_BYTES} bytes"
                raise self.refused(path, why)

    def _count(self) -> None:
        if len(self.files) + len(self.directories) > MAX_ENTRIES:
            raise BtrfsUblkError(
                f"{self.origin} lists more than {MAX_ENTRIES} files and directories",
                hint="take a part of it",
            )


def number(text: str | None) -> int | None:
    """Parse a number that is not negative; None where it is none, or none of a file."""
    found = re.fullmatch(r"\s*(\d{1,18})\s*", text or "")
    return int(found[1]) if found else None


def identity(tag: str | None, date: str | None = None) -> SourceKeys:
    """Return the key of a source that has it recognized by its ETag and Last-Modified.
    One that is too long for the server of the map is none (csrc/lazy/identity.h)."""
    said = [
        f"{name} {text}"
        for name, text in (("etag", tag), ("modified", date))
        if text and len(text) < 100 and text.isascii() and text.isprintable()
    ]
    return {"identity": " ".join(said)} if said else {}
