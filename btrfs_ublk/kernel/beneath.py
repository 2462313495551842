"""Use paths below a directory that other users may change at the same time.

The kernel resolves each in one call that follows no symbolic link and does not leave
the directory (openat2(2)). All that follows is done by descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path

from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import UsageError

#: asm-generic/unistd.h: the same number on all architectures. Linux 5.6.
_SYS_OPENAT2 = 437
#: linux/openat2.h
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
#: linux/fs.h
_RENAME_NOREPLACE = 1
#: EAGAIN asks us to try again: something was renamed while the kernel resolved "..".
_TRIES = 100
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    """struct open_how"""

    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    ]


class _Directory:
    """A descriptor that is closed when this object is finalised, if not before: a
    signal may come between the end of a block and the close that follows it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        self.__exit__()


@contextmanager
def opened_directory(path: Path | str, *, dir_fd: int | None = None) -> Iterator[int]:
    """Open a directory. No signal can make its descriptor leak. Raises OSError."""
    with deferred():
        directory = _Directory(os.open(path, _DIRECTORY, dir_fd=dir_fd))
    with directory as fd:
        yield fd


@contextmanager
def place_beneath(
    top: int, path: str, *, made: Callable[[str], object] | None = None
) -> Iterator[tuple[int, str]]:
    """Open the parent of ``path``, which is relative to the directory ``top``; yield
    its descriptor and the name in it. With ``made``, missing directories are made, and
    it is called with the path of each.

    Raises UsageError for a path that leads out of ``top``, or through a symbolic link,
    and OSError.
    """
    parent, name = os.path.split(path)
    directory = None
    try:
        with deferred():
            directory = _Directory(_open(top, parent or "."))
    except FileNotFoundError:
        if made is None or not parent:
            raise
        _make_directory(top, parent, made)
    except OSError as error:
        raise _refusal(error, top, path) or error
    if directory is None:
        with place_beneath(top, path) as place:
            yield place
    else:
        with directory as fd:
            yield fd, name


@contextmanager
def opened_beneath(top: int, path: str) -> Iterator[int]:
    """Open a directory, as place_beneath() does with the parent of a path."""
    with place_beneath(top, os.path.join(path, ".")) as (fd, _):
        yield fd


def exists_beneath(top: int, path: str) -> bool:
    """Do the same as os.path.lexists(). Raises UsageError as place_beneath() does."""
    try:
        with place_beneath(top, path) as (directory, name):
            os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def existing_beneath(top: int, paths: Iterable[str]) -> set[str]:
    """Return those of the paths that exist, by a call for each directory and entry. One
    that leads out of ``top``, or through a symbolic link, does not."""
    found = set()
    for parent, group in groupby(sorted(paths, key=os.path.split), os.path.dirname):
        with suppress(OSError, UsageError), opened_beneath(top, parent) as directory:
            for path in group:
                with suppress(FileNotFoundError):
                    name = os.path.basename(path)
                    os.stat(name, dir_fd=directory, follow_symlinks=False)
                    found.add(path)
    return found


def rename_beneath(directory: int, old: str, new: str) -> None:
    """Rename an entry of a directory; nothing is replaced. Raises OSError."""
    if _libc.renameat2(
        ctypes.c_int(directory),
        ctypes.c_char_p(os.fsencode(old)),
        ctypes.c_int(directory),
        ctypes.c_char_p(os.fsencode(new)),
        ctypes.c_uint(_RENAME_NOREPLACE),
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new)


def _make_directory(top: int, path: str, made: Callable[[str], object]) -> None:
    with place_beneath(top, path, made=made) as (directory, name):
        try:
            with deferred():
                os.mkdir(name, dir_fd=directory)
                made(path)
        except FileExistsError:
            pass  # Somebody else was faster. If it is a link, it is refused later.


def _refusal(error: OSError, top: int, path: str) -> UsageError | None:
    where = os.readlink(f"/proc/self/fd/{top}")
    if error.errno == errno.EXDEV:
        return UsageError(f"{path!r} is outside of {where}")
    if error.errno == errno.ELOOP:
        return UsageError(
            f"a symbolic link is on the way to {path!r} in {where}",
            hint="name the path that it leads to: a user who can change the link could "
            "have it lead anywhere",
        )
    return None


def _open(top: int, path: str) -> int:
    how = _OpenHow(_DIRECTORY, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS)
    number = errno.EAGAIN
    for _ in range(_TRIES):
        fd: int = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(top),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), path)
