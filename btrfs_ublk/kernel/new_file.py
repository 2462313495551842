"""Make files in directories that other users may write to.

Such a user can put a symbolic link, or another file, at a name between two system
calls. So a file is made without a name (O_TMPFILE; O_EXCL with a name where the file
system lacks that), is written and gets its mode by descriptor, and gets its name last.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from btrfs_ublk.base.ledger import Entry, process_ledger, remover
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.beneath import opened_directory

_KIND = "new-file"
#: Errors of open(2) where a file system has no O_TMPFILE (NFS, FUSE, vfat).
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_FLAGS = os.O_RDWR | os.O_CLOEXEC
_NAMED = _FLAGS | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@contextmanager
def new_file(
    path: StrPath,
    *,
    mode: int | None = None,
    replace: bool = False,
    synced: bool = False,
    dir_fd: int | None = None,
) -> Iterator[FileIO]:
    """Open a new file to write. It gets its name ``path`` when the block ends without
    an error; after an error, all is as before. ``path`` may be relative to a directory
    ``dir_fd``. The default mode is what the umask leaves of 0666. ``synced``: file and
    name are on disk when the block has ended.

    ``replace`` replaces a regular file of that name, but nothing else. Raises OSError,
    FileExistsError when there is something that is not replaced.
    """
    path = Path(path)
    try:
        with _new_file(path, mode, replace, synced, dir_fd) as file:
            yield file
    except OSError as error:
        if error.filename in (None, "."):
            error.filename = str(path)
        raise


@contextmanager
def _new_file(
    path: Path, mode: int | None, replace: bool, synced: bool, dir_fd: int | None
) -> Iterator[FileIO]:
    with opened_directory(path.parent, dir_fd=dir_fd) as directory:
        _check_free(path.name, directory, replace=replace)
        try:
            file = unnamed_file(directory, mode)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            yield from _named(path.name, directory, mode, replace, synced)
            return
        with file:
            yield from _filled(file, mode, synced)
            try:
                name_file(file, path.name, directory)
            except FileExistsError:
                if not replace:
                    raise
                with _temporary(directory) as new:
                    name_file(file, new, directory)
                    _replace(new, path.name, directory)
            if synced:
                # NB: btrfs does not log a file that has no name, so sync it again.
                os.fsync(file.fileno())
                os.fsync(directory)


def _named(
    name: str, directory: int, mode: int | None, replace: bool, synced: bool
) -> Iterator[FileIO]:
    """Make the file with a name. Do not use hard links, which may be missing, too."""
    with ExitStack() as stack:
        new = stack.enter_context(_temporary(directory)) if replace else name
        with deferred():  # it is removed once it is ours
            file = FileIO(new, "r+", opener=_opener(directory, _NAMED, mode))
            stack.enter_context(_removed_after_errors(new, directory))
        with file:
            yield from _filled(file, mode, synced)
        if replace:
            _replace(new, name, directory)
        if synced:
            os.fsync(directory)


def _filled(file: FileIO, mode: int | None, synced: bool) -> Iterator[FileIO]:
    yield file
    if mode is not None:
        os.fchmod(file.fileno(), mode)
    if synced:
        os.fsync(file.fileno())


def write_new(
    path: Path,
    data: bytes,
    *,
    mode: int | None = None,
    replace: bool = False,
    synced: bool = False,
) -> None:
    """Make a new_file() that holds ``data``. Raises OSError."""
    with (
        new_file(path, mode=mode, replace=replace, synced=synced) as file,
        open(file.fileno(), "wb", closefd=False) as buffered,
    ):
        buffered.write(data)


def _opener(directory: int, flags: int, mode: int | None) -> Callable[[str, int], int]:
    # NB: FileIO calls this, so that a descriptor cannot leak when a signal comes.
    return lambda name, _flags: os.open(
        name, flags, 0o666 if mode is None else 0o600, dir_fd=directory
    )


def _check_free(name: str, directory: int, *, replace: bool) -> None:
    """Raise FileExistsError before anything is written; os.link() finds later files."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not replace:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    if not stat.S_ISREG(status.st_mode):
        # A symbolic link may be another user's, and /dev/stdout must stay one.
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        why = f"it is {kind}, which is not replaced"
        raise FileExistsError(errno.EEXIST, why, name)


@contextmanager
def _temporary(directory: int) -> Iterator[str]:
    """Yield the name of a file that is to replace another one. If it is still there at
    the end, it is removed, and by ``gc`` after a kill."""
    with ExitStack() as stack:
        try:
            where = os.readlink(f"/proc/self/fd/{directory}")
            held = process_ledger().holding(_KIND, directory=where)
            tag = stack.enter_context(held).tag
        except (BtrfsUblkError, OSError):
            # This user has no state directory, say: no reason to write no file.
            tag = os.urandom(8).hex()
        name = _name(tag)
        stack.enter_context(_removed_after_errors(name, directory))
        yield name


def _name(tag: str) -> str:
    # It has no part of the file's own name, which may be as long as names can be.
    return f".btrfs-ublk-{tag}.tmp"


def _path(entry: Entry) -> Path:
    return Path(entry.details["directory"], _name(entry.tag))


@remover(_KIND, survives_reboot=True, place=lambda entry: str(_path(entry)))
def _remove(entry: Entry) -> bool:
    try:
        _path(entry).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def unnamed_file(directory: int, mode: int | None = None) -> FileIO:
    """Open a new file of a file system that has O_TMPFILE. Raises OSError."""
    return FileIO(".", "r+", opener=_opener(directory, _FLAGS | os.O_TMPFILE, mode))


def name_file(file: FileIO, name: str, directory: int) -> None:
    """Give an unnamed file its name. Raises OSError, FileExistsError."""
    # NB: do not use AT_EMPTY_PATH, which needs CAP_DAC_READ_SEARCH.
    os.link(f"/proc/self/fd/{file.fileno()}", name, dst_dir_fd=directory)


def _replace(new: str, name: str, directory: int) -> None:
    os.replace(new, name, src_dir_fd=directory, dst_dir_fd=directory)


@contextmanager
def _removed_after_errors(name: str, directory: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
        raise
