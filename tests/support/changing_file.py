"""A file that sources are served from, and all that may become of it."""

from __future__ import annotations

import os
import random
from pathlib import Path

#: Of a second each, as the ETags of nginx are.
FIRST_MTIME_S = 1_700_000_000

CHANGES = ("rewrite", "rewrite_unseen", "replace", "cut", "restore", "go", "come_back")


class ChangingFile:
    """``versions`` has the contents that it has had as a whole, the right one first."""

    def __init__(self, path: Path, size_bytes: int, draw: random.Random) -> None:
        self.path = path
        self._away = path.with_name(path.name + ".away")
        self._draw = draw
        self._mtime_s = FIRST_MTIME_S
        self.versions = [draw.randbytes(size_bytes)]
        #: It never was anything else, whether it is there or not.
        self.is_unchanged = True
        path.write_bytes(self.versions[0])
        self._stamp(path)

    @property
    def is_there(self) -> bool:
        return self.path.exists()

    def _stamp(self, path: Path) -> None:
        os.utime(path, (self._mtime_s, self._mtime_s))

    def _now(self) -> Path:
        return self.path if self.is_there else self._away

    def _write(self, content: bytes) -> None:
        """As a whole, in its place: the same inode."""
        file = os.open(self._now(), os.O_WRONLY)
        try:
            assert os.pwrite(file, content, 0) == len(content)
            os.ftruncate(file, len(content))
        finally:
            os.close(file)
        self.is_unchanged = False
        self._stamp(self._now())

    def _new_version(self) -> bytes:
        self.versions.append(self._draw.randbytes(len(self.versions[0])))
        return self.versions[-1]

    def rewrite(self) -> None:
        self._mtime_s += 1
        self._write(self._new_version())

    def rewrite_unseen(self) -> None:
        """Other content with the size, the inode and the mtime of what was there."""
        self._write(self._new_version())

    def replace(self) -> None:
        """By another file."""
        other = self.path.with_name(self.path.name + ".new")
        other.write_bytes(self._new_version())
        self._mtime_s += 1
        self._stamp(other)
        other.rename(self._now())
        self.is_unchanged = False

    def cut(self) -> None:
        """In the midst of a block."""
        self._mtime_s += 1
        content = self._now().read_bytes()
        self._write(content[: len(content) // 2 + 7])

    def restore(self) -> None:
        """To what it was at first, as far as anybody can see."""
        self._mtime_s = FIRST_MTIME_S
        self._write(self.versions[0])

    def go(self) -> None:
        if self.is_there:
            self.path.rename(self._away)

    def come_back(self) -> None:
        if not self.is_there:
            self._away.rename(self.path)
