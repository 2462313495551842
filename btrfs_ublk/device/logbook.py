"""A device's log: supervisor and servers append to it, and it stays small."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

_MAX_BYTES = 256 << 10
#: Of it, what is kept when it has grown too long.
_KEPT_BYTES = 64 << 10
_MAX_WORDS = 20


class Logbook:
    """The file ``path``; made by whoever writes first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def handler(self) -> logging.Handler:
        """For the package's logger."""
        handler = logging.FileHandler(self.path, encoding="utf-8", errors="replace")
        handler.setFormatter(
            logging.Formatter("%(asctime)s supervisor: %(levelname)s: %(message)s")
        )
        return handler

    def size(self) -> int:
        with suppress(OSError):
            return self.path.stat().st_size
        return 0

    def since(self, offset: int) -> list[str]:
        """What servers wrote after ``size()`` was ``offset``; the last lines of it."""
        lines = [line for line in self._lines(offset) if " supervisor: " not in line]
        return lines[-_MAX_WORDS:]

    def tail(self) -> list[str]:
        """The last lines, whoever wrote them."""
        return self._lines(0)[-_MAX_WORDS:]

    def _lines(self, offset: int) -> list[str]:
        try:
            with open(self.path, "rb") as file:
                file.seek(max(offset, self.size() - _KEPT_BYTES))
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def trim(self) -> None:
        """Cut off the oldest part of a long log. A line that a server writes just then
        may be lost.
        """
        if self.size() <= _MAX_BYTES:
            return
        # All writers append (O_APPEND), so each goes on at the new end.
        with suppress(OSError):
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                end = os.fstat(fd).st_size
                kept = os.pread(fd, _KEPT_BYTES, end - _KEPT_BYTES)
                os.ftruncate(fd, 0)
                os.write(fd, kept.partition(b"\n")[2])
            finally:
                os.close(fd)
