"""Lock devices with flock(2) on their files.

A lock belongs to the open file, not to the process: processes that inherit the
descriptor hold it, too, and it ends with the last of them, however that one dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.base.signals import deferred, delivered
from btrfs_ublk.errors import BtrfsUblkError, writing
from btrfs_ublk.kernel.users import links_of, pids

_RETRY_S = 0.02
#: Commands hold the lock only while they make or remove directories, which is short.
_REGISTRY_TIMEOUT_S = 10.0


class Lock:
    """A locked file; made by lock_file()."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Return the descriptor, for a child that is to hold the lock as well."""
        return self._fd

    def close(self) -> None:
        """Let go; idempotent. A child that inherited the lock still holds it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_file(
    path: Path, *, timeout_s: float = 0.0, interruptible: bool = False
) -> Lock | None:
    """Lock a file, which is made if missing. Returns None when it is still locked after
    ``timeout_s`` seconds, or its directory is gone. If ``interruptible``, signals are
    delivered while it waits, also within deferred().

    Raises BtrfsUblkError when it cannot be opened."""
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
            # It may have been removed between open(2) and flock(2).
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
        # flock(2) has no deadline, and no event says when the lock is released.
        with delivered() if interruptible else nullcontext():
            time.sleep(_RETRY_S)


#: How names of scratch directories begin.
SCRATCH = ".new-"


@contextmanager
def scratch_directory(
    parent: Path, what: str, locked: Callable[[], AbstractContextManager[object]]
) -> Iterator[Path]:
    """Yield a new directory in ``parent`` that is removed at the end, after those of
    dead commands. ``locked`` locks ``parent`` meanwhile. Raises BtrfsUblkError, which
    says that this command cannot ``what``."""
    new = parent / f"{SCRATCH}{os.urandom(8).hex()}"
    lock = None
    try:
        with locked(), deferred():
            remove_dead(parent)
            with writing(what):
                new.mkdir(mode=0o700)
            lock = lock_file(new / ".lock")
        yield new
    finally:
        with deferred():
            _remove(new)
            if lock is not None:
                lock.close()


@deferred()
def remove_dead(parent: Path) -> None:
    """Remove the scratch directories of dead commands: nobody holds their lock."""
    for path in parent.glob(f"{SCRATCH}*"):
        # NB: None also when its directory has gone.
        if (lock := lock_file(path / ".lock")) is not None:
            with lock:
                _remove(path)


def _remove(path: Path) -> None:
    # Supervisors have no such directories, and do without it.
    from shutil import rmtree

    rmtree(path, ignore_errors=True)


def is_locked(path: Path) -> bool:
    """Return whether anybody holds the lock; False when there is no such file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # NB: a shared lock, so that two processes that ask do not see each other. One
        # that wants the lock at that moment tries again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def holder_of(path: Path) -> ProcessIdentity:
    """Return a process that has the locked file open. Raises ProcessLookupError when
    nobody holds the lock, or only other PID namespaces show who does.

    NB: /proc/locks shows who took the lock, not who inherited it.
    """
    if is_locked(path):
        for process in openers_of(path):
            return process
    raise ProcessLookupError(f"nobody holds {path}")


def openers_of(path: Path) -> Iterator[ProcessIdentity]:
    """Yield the other processes that have the file open: they may wait for its lock."""
    for pid in pids():
        if pid != os.getpid() and any(x == str(path) for _, x in links_of(pid)):
            with suppress(ProcessLookupError):  # It has ended meanwhile.
                yield ProcessIdentity.of(pid)


@contextmanager
def registry_locked(directory: Path) -> Iterator[None]:
    """Let only the block make or remove devices there. Raises BtrfsUblkError."""
    lock = lock_file(directory / ".lock", timeout_s=_REGISTRY_TIMEOUT_S)
    if lock is None:
        raise BtrfsUblkError(
            f"{directory / '.lock'} was locked for {_REGISTRY_TIMEOUT_S:g} s",
            hint=f"see who holds it: fuser {directory / '.lock'}",
        )
    with lock:
        yield
