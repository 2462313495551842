"""Who may work on a device: flock(2) on its files.

A lock belongs to the open file, not to the process: it passes on to whoever inherits
the descriptor, and ends with the last one of them, however that dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.process import ProcessIdentity

_RETRY_S = 0.02
#: Directories are made and removed under it, which takes no time.
_REGISTRY_TIMEOUT_S = 10.0


class Lock:
    """A locked file; made by lock_file()."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """For a child that is to hold it as well."""
        return self._fd

    def close(self) -> None:
        """Let go; idempotent. A child that inherited it holds it on."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_file(path: Path, *, timeout_s: float = 0.0) -> Lock | None:
    """None when it is still locked, or no longer there, after ``timeout_s`` seconds.

    Raises BtrfsUblkError when it cannot be opened.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fd = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except FileNotFoundError:
            return None  # its directory is gone
        except OSError as error:
            raise BtrfsUblkError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have been removed between the two.
            if os.path.samestat(os.fstat(fd), path.stat()):
                return Lock(fd)
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() >= deadline_s:
            return None
        # flock(2) has no deadline of its own, and no event tells of its release.
        time.sleep(_RETRY_S)


def is_locked(path: Path) -> bool:
    """Whether anybody holds it; false where there is no such file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # NB: shared, so that two who ask do not see each other. One who comes to take
        # it just then tries again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def holder_of(path: Path) -> ProcessIdentity:
    """A process that has the locked file open. Raises ProcessLookupError when nobody
    holds the lock, or only some other namespace sees who.

    NB: /proc/locks tells who took it, not who has inherited it.
    """
    if is_locked(path):
        for directory in Path("/proc").glob("[0-9]*"):
            pid = int(directory.name)
            with suppress(OSError):  # it may end while we look
                for link in (directory / "fd").iterdir():
                    if pid != os.getpid() and os.readlink(link) == str(path):
                        return ProcessIdentity.of(pid)
    raise ProcessLookupError(f"nobody holds {path}")


@contextmanager
def registry_locked(directory: Path) -> Iterator[None]:
    """Nobody else makes or removes devices in ``directory`` meanwhile."""
    lock = lock_file(directory / ".lock", timeout_s=_REGISTRY_TIMEOUT_S)
    if lock is None:
        raise BtrfsUblkError(
            f"{directory / '.lock'} was locked for {_REGISTRY_TIMEOUT_S:g} s",
            hint=f"see who holds it: fuser {directory / '.lock'}",
        )
    with lock:
        yield
