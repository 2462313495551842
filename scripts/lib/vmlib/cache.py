"""The cache directory outside the repository, and the lock over it."""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import VmError

# What is done under a lock has limits of its own; this is for what goes wrong there.
_LOCK_LIMIT_S = 1200.0


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base).absolute() / "btrfs-ublk"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when the holder dies."""
    path = cache_dir() / f"{name}.lock"
    with open(path, "w", encoding="utf-8") as lock:
        _lock(lock.fileno(), path)
        yield


def _lock(fd: int, path: Path) -> None:
    end = time.monotonic() + _LOCK_LIMIT_S
    told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() >= end:
            raise VmError(
                f"another process has held {path} for {_LOCK_LIMIT_S:.0f} s; "
                f"it is among those of: fuser {path}"
            )
        if not told:
            told = True
            print(f"vm: waiting for another scripts/vm to free {path}", file=sys.stderr)
        time.sleep(0.1)  # NB: flock itself has no time limit
