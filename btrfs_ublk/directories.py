"""Directories in which root believes what it reads: nobody else may write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError


def make_private(path: Path, *, what: str, hint: str) -> Path:
    """Make a directory (mode 0700) unless it is there; returns ``path``.

    Raises BtrfsUblkError, naming it as ``what``, as check_private() does.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BtrfsUblkError(
            f"no {what} {path}: {error.strerror}", hint=hint
        ) from error
    check_private(path, what=what, hint=hint)
    return path


def check_private(path: Path, *, what: str, hint: str) -> None:
    """Raise BtrfsUblkError unless ``path`` is a directory (no symbolic link) of this
    user's that nobody else can write to.
    """
    try:
        status = path.lstat()
    except OSError as error:
        raise BtrfsUblkError(
            f"no {what} {path}: {error.strerror}", hint=hint
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise BtrfsUblkError(
            f"{what} {path} is not a directory owned by user {os.geteuid()}", hint=hint
        )
    if status.st_mode & 0o022:
        raise BtrfsUblkError(
            f"{what} {path} is writable for others "
            f"(mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"chmod 0700 {path}",
        )
