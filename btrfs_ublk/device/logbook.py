"""A device's log, to which supervisor and servers append, and which is kept small."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

_MAX_BYTES = 256 << 10
#: How much of its end is kept when it has grown too long.
_KEPT_BYTES = 64 << 10
_MAX_WORDS = 20


class Logbook:
    """The log in the file ``path``, which the first writer makes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def handler(self, *, thread: str | None = None) -> logging.Handler:
        """Make a handler for the package's logger. ``thread``: it takes only messages
        of threads of that name."""
        with suppress(OSError):  # The handler says what is wrong.
            # As all state it is its owner's alone, whatever the umask leaves to others.
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        handler = logging.FileHandler(self.path, encoding="utf-8", errors="replace")
        handler.setFormatter(
            logging.Formatter("%(asctime)s supervisor: %(levelname)s: %(message)s")
        )
        if thread is not None:
            handler.addFilter(lambda record: record.threadName == thread)
        return handler

    def size(self) -> int:
        with suppress(OSError):
            return self.path.stat().st_size
        return 0

    def since(self, offset: int) -> list[str]:
        """Return the last lines that servers wrote after ``size()`` was ``offset``."""
        lines = [line for line in self._lines(offset) if " supervisor: " not in line]
        return lines[-_MAX_WORDS:]

    def tail(self) -> list[str]:
        """Return the last lines of all writers."""
        return self._lines(0)[-_MAX_WORDS:]

    def _lines(self, offset: int) -> list[str]:
        try:
            with open(self.path, "rb") as file:
                file.seek(max(offset, self.size() - _KEPT_BYTES))
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def trim(self) -> None:
        """Remove the oldest part of a long log. A line that a server writes at that
        moment may be lost."""
        if self.size() <= _MAX_BYTES:
            return
        # All writers append (O_APPEND), so they continue at the new end.
        with suppress(OSError):
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                end = os.fstat(fd).st_size
                kept = os.pread(fd, _KEPT_BYTES, end - _KEPT_BYTES)
                os.ftruncate(fd, 0)
                os.write(fd, kept.partition(b"\n")[2])
            finally:
                os.close(fd)
