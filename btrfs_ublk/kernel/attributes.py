"""Attributes of files, as lsattr(1) shows them (linux/fs.h, ioctl_iflags(2))."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError

_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602

#: chattr +c and +m: the file is compressed, or never compressed. Both exclude NO_COW.
COMPRESSED = 0x00000004
NOT_COMPRESSED = 0x00000400
#: chattr +i: the file can be cloned from, but neither changed nor removed.
IMMUTABLE = 0x00000010
#: chattr +C, on btrfs: no copy-on-write and no checksums; a directory's new files
#: inherit it. Only empty files take it.
NO_COW = 0x00800000

_ACLS = ("system.posix_acl_access", "system.posix_acl_default")

_Result = TypeVar("_Result")


def get_attributes(file: Path | int) -> int:
    """Return the attributes of a path or descriptor. Raises OSError where the file
    system has none."""
    if isinstance(file, Path):
        return _with_descriptor(get_attributes, file)
    answer = fcntl.ioctl(file, _FS_IOC_GETFLAGS, bytes(8))
    attributes: int = struct.unpack_from("=I", answer)[0]
    return attributes


def set_attributes(fd: int, attributes: int) -> None:
    """Set the attributes of a descriptor, without a look whether the file system has
    ignored some. Raises OSError."""
    fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("=I", attributes))


def add_attributes(file: Path | int, attributes: int) -> None:
    """Set attributes of a path or descriptor, and keep the others. Raises
    BtrfsUblkError when they cannot be set, or are ignored."""
    try:
        wanted = get_attributes(file) | attributes
        _with_descriptor(set_attributes, file, wanted)
        missing = wanted & ~get_attributes(file)
    except OSError as error:
        raise BtrfsUblkError(
            f"{_name(file)}: cannot set attributes {attributes:#x}: {error.strerror}"
        ) from error
    # NB: btrfs ignores NO_COW on a file that is not empty, without an error.
    if missing:
        raise BtrfsUblkError(f"{_name(file)}: attributes {missing:#x} were ignored")


def remove_attributes(file: Path | int, attributes: int) -> None:
    """Clear attributes of a path or descriptor. Raises BtrfsUblkError on failure."""
    try:
        wanted = get_attributes(file) & ~attributes
        _with_descriptor(set_attributes, file, wanted)
    except OSError as error:
        raise BtrfsUblkError(
            f"{_name(file)}: cannot remove attributes {attributes:#x}: {error.strerror}"
        ) from error


def remove_acls(path: Path) -> None:
    """Remove the access lists that a new directory has inherited from the default one
    of the directory that it is in. Its mode is what it was made with. Raises OSError.
    """
    for name in _ACLS:
        try:
            os.removexattr(path, name)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise


def _name(file: Path | int) -> str:
    return os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)


def _with_descriptor(
    function: Callable[..., _Result], file: Path | int, *arguments: int
) -> _Result:
    if isinstance(file, int):
        return function(file, *arguments)
    with deferred():
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return function(fd, *arguments)
        finally:
            os.close(fd)
