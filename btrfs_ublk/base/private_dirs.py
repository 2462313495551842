"""Directories whose content root trusts: no other user may write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError, CapabilityError

#: Volumes are kept in the directory that the variable names, else in this one.
VOLUMES_VARIABLE = "BTRFS_UBLK_VOLUMES_DIR"
VOLUMES_DIRECTORY = "/var/lib/btrfs-ublk/volumes"

#: The administrator's files are in the directory that the variable names, else in this.
CONFIG_VARIABLE = "BTRFS_UBLK_CONFIG_DIR"
CONFIG_DIRECTORY = "/etc/btrfs-ublk"


def make_private(path: Path, *, what: str, hint: str) -> Path:
    """Make a directory (mode 0700) unless it is there; returns ``path``.

    Raises BtrfsUblkError, naming it as ``what``, as check_private() does.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except PermissionError as error:
        raise CapabilityError(f"{what} {path}: {error.strerror}", hint=hint) from error
    except FileExistsError:
        pass  # check_private() says what is there.
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot make {what} {path}: {error.strerror}", hint=hint
        ) from error
    check_private(path, what=what, hint=hint)
    return path


def missing_directories(path: Path) -> list[Path]:
    """Return the directories that ``mkdir -p`` would make: of this one and its parents,
    those that do not exist, the deepest first."""
    return [each for each in (path, *path.parents) if not os.path.lexists(each)]


def check_private(
    path: Path, *, what: str, hint: str, missing_ok: bool = False
) -> None:
    """Raise BtrfsUblkError unless ``path`` is a directory (no symbolic link) that
    belongs to this user and that no other user can write to. Raise CapabilityError when
    it is root's, or cannot be looked at. ``missing_ok``: it may also be missing."""
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
    if not stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        raise BtrfsUblkError(f"{what} {path} is not a directory")
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
