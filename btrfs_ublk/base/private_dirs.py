"""Directories and files that root trusts: no other user may write there, or have
another directory in the place of one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, UsageError, why_unread

#: Volumes are kept in the directory that the variable names, else in this one.
VOLUMES_VARIABLE = "BTRFS_UBLK_VOLUMES_DIR"
VOLUMES_DIRECTORY = "/var/lib/btrfs-ublk/volumes"

#: The administrator's files are in the directory that the variable names, else in this.
CONFIG_VARIABLE = "BTRFS_UBLK_CONFIG_DIR"
CONFIG_DIRECTORY = "/etc/btrfs-ublk"

_MAX_LINKS = 40  # as the kernel follows (path_resolution(7))


def read_trusted_toml(path: Path) -> dict[str, Any] | None:
    """Read a file that decides what root trusts; None without one. Raises UsageError,
    also where another user could change it."""
    import tomllib  # Nearly all commands do without it.

    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            keys = tomllib.loads(file.read().decode())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {why_unread(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise UsageError(
            f"{path} can be changed by others",
            hint=f"chown root {path}; chmod 644 {path}",
        )
    return keys


def make_private(path: Path, *, what: str, hint: str) -> Path:
    """Make a directory (mode 0700) unless it is there; returns ``path``.

    Raises BtrfsUblkError, naming it as ``what``, as check_private() does.
    """
    check_way(path, what=what, hint=hint)
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
    belongs to this user, that no other user can write to, and that check_way() allows.
    Raise CapabilityError when it is root's, or cannot be looked at. ``missing_ok``: it
    may also be missing."""
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
            hint=f"chmod go-w {path}",
        )
    check_way(path, what=what, hint=hint)


def check_way(path: Path, *, what: str, hint: str) -> None:
    """Raise BtrfsUblkError when another user can put something else in the place of
    ``path``, as a directory or symbolic link above it is theirs to change.
    In a directory with the sticky bit, they can change only what is theirs. Who has
    become root by sudo may do all anyway, so what is theirs is no other user's."""
    trusted = {0, os.geteuid(), *_unmapped()}
    if os.geteuid() == 0 and (caller := os.environ.get("SUDO_UID", "")).isdecimal():
        trusted.add(int(caller))
    for each in _way(path):
        try:
            status = each.lstat()
        except OSError:
            continue  # It is not there yet, or the command that uses it will see.
        is_open = (
            stat.S_ISDIR(status.st_mode)
            and not status.st_mode & stat.S_ISVTX
            and (
                status.st_mode & stat.S_IWOTH
                or (status.st_mode & stat.S_IWGRP and _has_group(each, status))
            )
        )
        if status.st_uid not in trusted or is_open:
            raise BtrfsUblkError(
                f"{what} {path}: other users can change {each} (of user "
                f"{status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}), and "
                "so have something else in its place",
                hint=hint or "choose one below directories that are root's",
            )


def follow_own_link(path: Path) -> Path:
    """Return where a symbolic link of this user's leads to, or else ``path``: who has
    made it may have their directories there. check_way() is for the way to it."""
    try:
        is_own = path.is_symlink() and path.lstat().st_uid == os.geteuid()
    except OSError:
        return path
    return Path(os.path.realpath(path)) if is_own else path


def _way(path: Path) -> Iterator[Path]:
    """Yield all directories and symbolic links that the kernel passes on its way to
    the last component of a path (path_resolution(7)), which is left out."""
    parts = path.absolute().parts[1:]
    names = list(reversed(parts if parts[-1:] == ("..",) else parts[:-1]))
    place, links = Path("/"), 0
    yield place
    while names:
        name = names.pop()
        if name == "..":
            place = place.parent
            continue
        each = place / name
        yield each
        try:
            target = Path(os.readlink(each))
        except OSError:
            place = each
            continue
        links += 1
        if links > _MAX_LINKS:
            raise BtrfsUblkError(
                f"{path} leads through more than {_MAX_LINKS} symbolic links"
            )
        if target.is_absolute():
            place = Path("/")
        names += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _has_group(path: Path, status: os.stat_result) -> bool:
    """Whether others than root may be in what the mode has for the group: an access
    list puts the most that anybody of it may do there (acl(5))."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        names = []
    return status.st_gid != 0 or "system.posix_acl_access" in names


def _unmapped() -> list[int]:
    """Return what users are shown as that a user namespace does not have: root of the
    host, who may do all, and others, who cannot be told apart from it."""
    try:
        mapped = Path("/proc/self/uid_map").read_text().split()
        if mapped == ["0", "0", str(2**32 - 1)]:
            return []
        return [int(Path("/proc/sys/kernel/overflowuid").read_text())]
    except (OSError, ValueError):
        return []
