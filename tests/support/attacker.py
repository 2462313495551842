"""Another user of the machine, who changes his directory while root works in it."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UID = 65534
#: linux/fs.h, fcntl.h
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextmanager
def attacking(directory: Path, step: Callable[[], object]) -> Iterator[None]:
    """A process of that user's calls ``step`` over and over, in ``directory``."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.chdir(directory)
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            os.write(writer, b"x")
            while os.getppid() != 1:
                with suppress(OSError):
                    step()
        finally:
            os._exit(1)
    try:
        os.close(writer)
        with open(reader, "rb") as ready:
            assert ready.read(1) == b"x"
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def link_whatever_appears(victim: Path, known: frozenset[str]) -> Callable[[], None]:
    """Put a symbolic link to ``victim`` where a name appears that is not ``known``."""

    def step() -> None:
        for name in set(os.listdir(".")) - known:
            if not os.path.islink(name):
                os.unlink(name)
                os.symlink(victim, name)

    return step


def exchange(one: str, other: str) -> Callable[[], None]:
    """Have two names change places."""
    libc = ctypes.CDLL(None)
    names = one.encode(), other.encode()

    def step() -> None:
        first, second = names
        libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE)

    return step


_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000

_LIBC = ctypes.CDLL(None, use_errno=True)
