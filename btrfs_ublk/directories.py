"""Directories in which root believes what it reads: nobody else may write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError, CapabilityError


def make_private(path: Path, *, what: str, hint: str) -> Path:
    """Make a directory (mode 0700) unless it is there; returns ``path``.

    Raises BtrfsUblkError, naming it as ``what``, as check_private() does.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except PermissionError as error:
        raise CapabilityError(f"{what} {path}: {error.strerror}", hint=hint) from error
    except OSError as error:
        raise BtrfsUblkError(
            f"no {what} {path}: {error.strerror}", hint=hint
        ) from error
    check_private(path, what=what, hint=hint)
    return path


def missing_directories(path: Path) -> list[Path]:
    """The directory and those above it that are not there, the deepest first: what
    ``mkdir -p`` would make.
    """
    return [each for each in (path, *path.parents) if not os.path.lexists(each)]


def check_private(
    path: Path, *, what: str, hint: str, missing_ok: bool = False
) -> None:
    """Raise BtrfsUblkError unless ``path`` is a directory (no symbolic link) of this
    user's that nobody else can write to; CapabilityError where it is root's.
    ``missing_ok``: or is not there.
    """
    try:
        status = path.lstat()
    except PermissionError as error:
        raise CapabilityError(f"{what} {path}: {error.strerror}", hint=hint) from error
    except OSError as error:
        if missing_ok and isinstance(error, FileNotFoundError):
            return
        raise BtrfsUblkError(
            f"no {what} {path}: {error.strerror}", hint=hint
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        is_roots = status.st_uid == 0 and os.geteuid() != 0
        raise (CapabilityError if is_roots else BtrfsUblkError)(
            f"{what} {path} is not a directory owned by user {os.geteuid()}", hint=hint
        )
    if status.st_mode & 0o022:
        raise BtrfsUblkError(
            f"{what} {path} is writable for others "
            f"(mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"chmod 0700 {path}",
        )
