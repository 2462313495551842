"""A thread that writes small files all the time, and reads them back."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from btrfs_ublk.bench.verified_reads import NoAnswerError
from btrfs_ublk.readers import read_direct
from btrfs_ublk.units import KIB

_MAX_BYTES = 64 * KIB
#: So many stay; each new one replaces the oldest.
_KEPT_FILES = 64
#: Between two files: it is to notice what happens, not to keep a disk busy.
_PAUSE_S = 0.02


class WrittenFiles:
    """``with WrittenFiles(directory, …) as files:`` writes to it in the block."""

    def __init__(self, directory: Path, *, seed: int, deadline_s: float) -> None:
        self._directory = directory
        self._chances = random.Random(seed)
        self._deadline_s = deadline_s
        self._end = threading.Event()
        # A daemon: one that waits in the kernel must not keep us from saying so.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begin_s: float | None = None
        self._files = 0
        self._max_s = 0.0
        self._errors: list[str] = []

    def __enter__(self) -> WrittenFiles:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(self._deadline_s)

    def check(self) -> None:
        """Raise NoAnswerError when it waits for longer than ``deadline_s``."""
        begin_s = self._begin_s
        if begin_s is not None and time.monotonic() - begin_s > self._deadline_s:
            raise NoAnswerError(f"writing a file takes over {self._deadline_s:g} s")

    def report(self) -> dict[str, Any]:
        """ "errors" are messages; "max_s" is the time of the slowest file."""
        return {"files": self._files, "errors": self._errors, "max_s": self._max_s}

    def _run(self) -> None:
        while not self._end.wait(_PAUSE_S):
            self._begin_s = begin_s = time.monotonic()
            path = self._directory / str(self._files % _KEPT_FILES)
            try:
                self._write(path)
            except (OSError, EOFError) as error:
                self._errors.append(str(error))
            self._begin_s = None
            self._max_s = max(self._max_s, time.monotonic() - begin_s)
            self._files += 1

    def _write(self, path: Path) -> None:
        data = self._chances.randbytes(self._chances.randint(1, _MAX_BYTES))
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if read_direct(path, 0, len(data)) != data:
            self._errors.append(f"{path} is not what was written")
