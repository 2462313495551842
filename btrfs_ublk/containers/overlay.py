"""Containers as overlays: what is below is shared, also in the page cache.

    ID/                       a snapshot of the parent, as other active snapshots
    ID/.btrfs-ublk-overlay/   upper and work; layer, a symbolic link to the parent

The tree of the snapshot is not shown. It is there for its inode numbers, as in forks,
and for the commit, which moves what is in upper to its place in it: all is in one
subvolume, so no data are copied, and the same subvolume stays charged for them. A merge
that was killed is gone on with by the next call.

What is in upper is a container's, perhaps at work: no path of it is followed.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.volume.forks import (
    LAYER,
    OVERLAY,
    OVERLAY_OPTIONS,
    UPPER,
    WORK,
    furnish_overlay,
)

_OPAQUE = "trusted.overlay.opaque"
_OURS = "trusted.overlay."
#: The times that a directory had before a merge took the first thing out of it.
_TIMES = "trusted.overlay.btrfs-ublk.times"


def make_overlay(snapshot: Path, parent: Path) -> None:
    """Make the directories of an overlay in a new snapshot of ``parent``. Raises
    UsageError when the image has something of their name, and OSError."""
    try:
        furnish_overlay(snapshot, parent, parent.absolute())
    except FileExistsError as error:
        raise UsageError(
            f"{parent} has a {OVERLAY} of its own, so it cannot be below an overlay",
            hint="make it a snapshot instead",
        ) from error


def mount_options(snapshot: Path) -> tuple[str, ...]:
    """Return the options that mount an overlay."""
    directory = snapshot.absolute() / OVERLAY
    # NB: the link has no colon, and chain IDs have. By the options, whole files lie in
    # upper, under their names: a merge needs that.
    return (
        f"lowerdir={directory / LAYER}",
        f"upperdir={directory / UPPER}",
        f"workdir={directory / WORK}",
        *OVERLAY_OPTIONS,
    )


def check_merge(snapshot: Path) -> None:
    """Raise UsageError for an overlay that cannot be merged."""
    if os.path.lexists(snapshot / OVERLAY / UPPER / OVERLAY):
        raise UsageError(f"{OVERLAY} at the top of a container cannot be committed")


def merge_overlay(snapshot: Path) -> None:
    """Give the snapshot's tree what its overlay shows; the overlay goes. May be called
    again after a kill at any moment. Raises BtrfsUblkError."""
    directory = snapshot / OVERLAY
    try:
        with _opened(snapshot) as tree:
            if os.path.lexists(directory / UPPER):
                with _opened(directory / UPPER) as upper:
                    _merge(upper, tree)
                    os.setxattr(tree, _TIMES, os.getxattr(upper, _TIMES))
            if os.path.lexists(directory):
                shutil.rmtree(directory)
            if _TIMES in os.listxattr(tree):
                os.utime(tree, ns=_times(tree))
                os.removexattr(tree, _TIMES)
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot merge {snapshot}: {error.filename or ''} {error.strerror}"
        ) from error


@contextmanager
def _opened(path: str | Path, *, dir_fd: int | None = None) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _merge(upper: int, tree: int) -> None:
    times = _times(upper)
    for name in os.listdir(upper):
        status = os.stat(name, dir_fd=upper, follow_symlinks=False)
        there = _mode(name, tree)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # a whiteout
            _remove(name, tree, there)
            os.unlink(name, dir_fd=upper)
        elif not stat.S_ISDIR(status.st_mode):
            if there is not None and stat.S_ISDIR(there):
                _remove(name, tree, there)
            _strip(f"/proc/self/fd/{upper}/{name}")
            os.rename(name, name, src_dir_fd=upper, dst_dir_fd=tree)
        else:
            _merge_directory(name, upper, tree, there)
    _take_attributes(upper, tree)
    os.utime(tree, ns=times)


def _merge_directory(name: str, upper: int, tree: int, there: int | None) -> None:
    with _opened(name, dir_fd=upper) as directory:
        if there is not None and stat.S_ISDIR(there) and not _is_opaque(directory):
            with _opened(name, dir_fd=tree) as below:
                _merge(directory, below)
            os.rmdir(name, dir_fd=upper)
            return
        _clean(directory)
        # NB: it stays opaque until what it hides has gone.
        _remove(name, tree, there)
        _strip(f"/proc/self/fd/{directory}/.")
    os.rename(name, name, src_dir_fd=upper, dst_dir_fd=tree)


def _clean(directory: int) -> None:
    """Remove all that only overlays understand, below a directory."""
    times = _times(directory)
    for name in os.listdir(directory):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            os.unlink(name, dir_fd=directory)
            continue
        if stat.S_ISDIR(status.st_mode):
            with _opened(name, dir_fd=directory) as below:
                _clean(below)
        _strip(f"/proc/self/fd/{directory}/{name}")
    os.utime(directory, ns=times)


def _times(directory: int) -> tuple[int, int]:
    """Return the times of access and modification that a directory shall keep."""
    try:
        accessed, modified = os.getxattr(directory, _TIMES).split()
        return int(accessed), int(modified)
    except OSError:
        status = os.fstat(directory)
        times = status.st_atime_ns, status.st_mtime_ns
        os.setxattr(directory, _TIMES, b"%d %d" % times)
        return times


def _strip(path: str) -> None:
    for name in os.listxattr(path, follow_symlinks=False):
        if name.startswith(_OURS):
            os.removexattr(path, name, follow_symlinks=False)


def _is_opaque(directory: int) -> bool:
    with suppress(OSError):
        return os.getxattr(directory, _OPAQUE) == b"y"
    return False


def _mode(name: str, directory: int) -> int | None:
    with suppress(FileNotFoundError):
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    return None


def _remove(name: str, directory: int, mode: int | None) -> None:
    if mode is None:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


def _take_attributes(source: int, target: int) -> None:
    """Give a directory the owner, mode, attributes and times of another one."""
    status = os.fstat(source)
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    wanted = {
        name: os.getxattr(source, name)
        for name in os.listxattr(source)
        if not name.startswith(_OURS)
    }
    for name in os.listxattr(target):
        if name not in wanted:
            os.removexattr(target, name)
    for name, value in wanted.items():
        os.setxattr(target, name, value)
