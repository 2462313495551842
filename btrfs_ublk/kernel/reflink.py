"""Clone ranges of files (reflinks), which then share data (ioctl_ficlonerange(2))."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from contextlib import AbstractContextManager, nullcontext
from typing import IO

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.attributes import (
    COMPRESSED,
    NO_COW,
    NOT_COMPRESSED,
    get_attributes,
    set_attributes,
)
from btrfs_ublk.kernel.beneath import place_beneath
from btrfs_ublk.kernel.new_file import name_file, new_file, unnamed_file
from btrfs_ublk.units import BLOCK_BYTES

# linux/fs.h
_FICLONERANGE = 0x4020940D

#: struct file_clone_range: src_fd, src_offset, src_length, dest_offset.
_RANGE = struct.Struct("=qQQQ")

#: Offsets are signed in the kernel (loff_t).
_MAX_OFFSET = (1 << 63) - 1

File = StrPath | int


def _opened(
    file: File, mode: str, what: str
) -> AbstractContextManager[int | IO[bytes]]:
    if isinstance(file, int):
        return nullcontext(file)
    # NB: a bare descriptor would leak, and keep the mount busy, if a signal came
    # before any block closes it. A file object is closed by its finaliser.
    try:
        return open(file, mode, buffering=0)
    except OSError as error:
        immutable = "is it immutable? lsattr shows an i"
        raise UsageError(
            f"clone {what} {file}: {error.strerror}",
            hint=immutable if error.errno == errno.EPERM else None,
        ) from error


def _fileno(file: int | IO[bytes]) -> int:
    return file if isinstance(file, int) else file.fileno()


def _name(fd: int) -> str:
    path = os.readlink(f"/proc/self/fd/{fd}")
    # The file that virtual_file_of() opens is not below any mount.
    return "the virtual data" if path == "/" else path


def clone_range(
    source: File,
    target: File,
    *,
    source_offset: int = 0,
    length_bytes: int = 0,
    target_offset: int = 0,
) -> None:
    """Make a range of ``target`` share the data of a range of ``source``.

    Both are paths or descriptors of existing files on one mounted file system. Offsets
    and length are multiples of the block size, but the length need not be one if it
    ends at the source's end; 0 means up to there. Raises UsageError for impossible
    values (negative, or 8 EiB and more) and for a path that cannot be opened, and
    BtrfsUblkError, which explains what the kernel's error number means here.
    """
    for what, value in (
        ("source_offset", source_offset),
        ("length_bytes", length_bytes),
        ("target_offset", target_offset),
    ):
        if not 0 <= value <= _MAX_OFFSET:
            raise UsageError(f"{what} {value} is not from 0 to {_MAX_OFFSET}")
    with (
        _opened(source, "rb", "source") as source_file,
        _opened(target, "r+b", "target") as target_file,
    ):
        target_fd = _fileno(target_file)
        _share(
            _fileno(source_file),
            target_fd,
            (source_offset, length_bytes, target_offset),
            target_name=_name(target_fd),
        )


def match_checksums(source: File, target: File) -> None:
    """If ``source`` has no checksums, make the empty file ``target`` have none either:
    the kernel only clones between files that both have them or both have none.

    Raises BtrfsUblkError when the kernel refuses.
    """
    with (
        _opened(source, "rb", "source") as source_file,
        _opened(target, "r+b", "target") as target_file,
    ):
        source_fd, target_fd = _fileno(source_file), _fileno(target_file)
        if is_nodatasum(source_fd):
            _leave_checksums_out(target_fd)


def _leave_checksums_out(fd: int) -> None:
    """Do so for an empty file. Raises BtrfsUblkError."""
    try:
        inherited = get_attributes(fd)  # from the directory
        plain = inherited & ~(COMPRESSED | NOT_COMPRESSED)
        if plain != inherited:
            set_attributes(fd, plain)  # The kernel requires two steps.
        if not plain & NO_COW:
            set_attributes(fd, plain | NO_COW)
    except OSError as error:
        raise BtrfsUblkError(
            f"{_name(fd)}: cannot set attribute {NO_COW:#x}: {error.strerror}"
        ) from error


def _share(
    source_fd: int, target_fd: int, where: tuple[int, int, int], *, target_name: str
) -> None:
    source_offset, length_bytes, target_offset = where
    argument = _RANGE.pack(source_fd, source_offset, length_bytes, target_offset)
    try:
        fcntl.ioctl(target_fd, _FICLONERANGE, argument)
    except OSError as error:
        reason, hint = _explain(error, source_fd, target_fd, argument)
        end = source_offset + length_bytes
        part = f"[{source_offset}, {end if length_bytes else 'end'})"
        raise BtrfsUblkError(
            f"cannot clone {part} of {_name(source_fd)} to offset {target_offset} "
            f"of {target_name}: {reason}",
            hint=hint,
        ) from error


def clone_file(
    source: File, target: StrPath, *, source_offset: int, size_bytes: int
) -> None:
    """Make a new file of ``size_bytes`` that shares a range of ``source``. If that has
    no checksums, the new file has none either.

    Any size is allowed: whole blocks are cloned, then the file is truncated. Raises
    UsageError when there is no source, the range is not within it, or ``target``
    exists, BtrfsUblkError as clone_range() does; nothing is left at ``target`` then.
    """
    with _opened(source, "rb", "source") as source_file:
        try:
            with new_file(target) as file:
                _clone_into(
                    _fileno(source_file),
                    file.fileno(),
                    source_offset=source_offset,
                    size_bytes=size_bytes,
                    target_name=str(target),
                )
        except OSError as error:
            raise UsageError(f"new file {target}: {error.strerror}") from error


def clone_beneath(
    source: File, top: int, path: str, *, source_offset: int, size_bytes: int
) -> None:
    """Do as clone_file(), to a path below the directory ``top``, which others may
    change meanwhile; see place_beneath() and new_file(). Raises OSError as well."""
    with (
        _opened(source, "rb", "source") as source_file,
        place_beneath(top, path) as (directory, name),
        new_file(name, dir_fd=directory) as file,
    ):
        _clone_into(
            _fileno(source_file),
            file.fileno(),
            source_offset=source_offset,
            size_bytes=size_bytes,
            target_name=path,
        )


def clone_in_directory(
    source: int,
    directory: int,
    name: str,
    *,
    source_offset: int,
    size_bytes: int,
    mode: int,
    mtime_s: float | None = None,
) -> None:
    """Do as clone_file(), by descriptors, in a directory of btrfs. The file is whole
    when it gets its name, and nothing is synced. Raises OSError as well."""
    with unnamed_file(directory) as file:
        fd = file.fileno()
        _clone_into(
            source,
            fd,
            source_offset=source_offset,
            size_bytes=size_bytes,
            target_name=name,
        )
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:  # an ACL, or the umask
            os.fchmod(fd, mode)
        if mtime_s is not None:
            os.utime(fd, (mtime_s, mtime_s))
        name_file(file, name, directory)


def _clone_into(
    source_fd: int,
    target_fd: int,
    *,
    source_offset: int,
    size_bytes: int,
    target_name: str,
) -> None:
    """Clone into an empty file. Raises as clone_file() does."""
    source_bytes = os.fstat(source_fd).st_size
    # NB: what lies beyond the source's end would be zeroes in the new file: a hole.
    if source_offset < 0 or not 0 <= size_bytes <= source_bytes - source_offset:
        raise UsageError(
            f"cannot clone {size_bytes} bytes at offset {source_offset} of "
            f"{_name(source_fd)}: it has {source_bytes} bytes",
            hint="offset and length must lie within it",
        )
    if not size_bytes:
        return
    if is_nodatasum(source_fd):
        _leave_checksums_out(target_fd)
    blocks_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
    # The last block of the source may be incomplete as well.
    length_bytes = min(blocks_bytes, source_bytes - source_offset)
    _share(
        source_fd, target_fd, (source_offset, length_bytes, 0), target_name=target_name
    )
    if length_bytes != size_bytes:
        os.truncate(target_fd, size_bytes)


def is_nodatasum(fd: int) -> bool | None:
    """Return whether the file has the C attribute, with which btrfs keeps no checksums
    of its data; None where the file system has no attributes."""
    try:
        return bool(get_attributes(fd) & NO_COW)
    except OSError:
        return None


def _explain(
    error: OSError, source_fd: int, target_fd: int, argument: bytes
) -> tuple[str, str | None]:
    """Explain an error of fs/remap_range.c or fs/btrfs/reflink.c: reason and hint."""
    _, source_offset, length_bytes, target_offset = _RANGE.unpack(argument)
    source, target = os.fstat(source_fd), os.fstat(target_fd)
    block = source.st_blksize
    end = source_offset + length_bytes
    if error.errno == errno.EXDEV:
        return "they are on different file systems", "clone within one mount"
    if error.errno == errno.EOPNOTSUPP:
        return "the file system cannot share data", "use btrfs (or XFS with reflink)"
    if error.errno == errno.EPERM:
        return "the target may not be changed", "is it immutable? lsattr shows an i"
    if error.errno == errno.EROFS:
        return "the file system is read-only", "remount it rw"
    if error.errno == errno.ENOSPC:
        return "there is no space left for metadata", "enlarge the writable device"
    if error.errno != errno.EINVAL:
        return error.strerror or str(error), None
    if any(value % block for value in (source_offset, target_offset)) or (
        length_bytes % block and end != source.st_size
    ):
        return f"offsets and length are not multiples of {block} bytes", None
    if end > source.st_size:
        return f"the source ends at {source.st_size} bytes", None
    if is_nodatasum(source_fd) != is_nodatasum(target_fd):
        return (
            "one of them has data checksums and the other has not (nodatasum)",
            "chattr +C the target while it is empty, or mount with nodatasum",
        )
    if os.path.samestat(source, target):
        return "the ranges overlap in one file", None
    return "the kernel calls it invalid (EINVAL)", None
