"""Clones of ranges (reflinks): shared, not moved (ioctl_ficlonerange(2))."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import AbstractContextManager, nullcontext
from io import FileIO
from pathlib import Path
from typing import IO

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import BLOCK_BYTES

# linux/fs.h
_FICLONERANGE = 0x4020940D
_FS_IOC_GETFLAGS = 0x80086601
_FS_NOCOW_FL = 0x00800000

#: struct file_clone_range: src_fd, src_offset, src_length, dest_offset.
_RANGE = struct.Struct("=qQQQ")

File = Path | int


def _opened(
    file: File, mode: str, what: str
) -> AbstractContextManager[int | IO[bytes]]:
    if isinstance(file, int):
        return nullcontext(file)
    # NB: a bare descriptor would leak, and keep the mount busy, when a signal comes
    # before anything guards it; a file object closes itself.
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
    return os.readlink(f"/proc/self/fd/{fd}")


def clone_range(
    source: File,
    target: File,
    *,
    source_offset: int = 0,
    length_bytes: int = 0,
    target_offset: int = 0,
) -> None:
    """Make a range of ``target`` share the data of a range of ``source``.

    Both are paths or descriptors of files on one mounted file system; the target
    exists. Offsets and length are multiples of the block size; only a length that ends
    at the source's end may be odd, and 0 means up to there. Raises BtrfsUblkError,
    which explains what the kernel's error number means here.
    """
    with (
        _opened(source, "rb", "source") as source_file,
        _opened(target, "r+b", "target") as target_file,
    ):
        source_fd, target_fd = _fileno(source_file), _fileno(target_file)
        argument = _RANGE.pack(source_fd, source_offset, length_bytes, target_offset)
        try:
            fcntl.ioctl(target_fd, _FICLONERANGE, argument)
        except OSError as error:
            reason, hint = _explain(error, source_fd, target_fd, argument)
            end = source_offset + length_bytes
            part = f"[{source_offset}, {end if length_bytes else 'end'})"
            raise BtrfsUblkError(
                f"cannot clone {part} of {_name(source_fd)} to offset {target_offset} "
                f"of {_name(target_fd)}: {reason}",
                hint=hint,
            ) from error


def _made(target: Path) -> FileIO:
    try:
        return open(target, "xb", buffering=0)
    except OSError as error:
        raise UsageError(f"new file {target}: {error.strerror}") from error


def clone_file(
    source: File, target: Path, *, source_offset: int, size_bytes: int
) -> None:
    """Make a new file of ``size_bytes`` that shares a range of ``source``.

    The size may be any: whole blocks are cloned, then the file is cut. Raises
    UsageError when there is no source, or ``target`` exists, BtrfsUblkError as
    clone_range(); the target is gone then.
    """
    with _opened(source, "rb", "source") as source_file, _made(target) as file:
        try:
            if size_bytes:
                source_fd = _fileno(source_file)
                blocks_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
                source_bytes = os.fstat(source_fd).st_size
                clone_range(
                    source_fd,
                    file.fileno(),
                    source_offset=source_offset,
                    # The source's own last block may be cut as well.
                    length_bytes=min(blocks_bytes, source_bytes - source_offset),
                )
                file.truncate(size_bytes)
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def is_nodatasum(fd: int) -> bool | None:
    """True when the file has the C attribute, which on btrfs means no checksums of its
    data either; None where the file system knows no attributes.
    """
    try:
        answer = fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8))
    except OSError:
        return None
    return bool(struct.unpack_from("=I", answer)[0] & _FS_NOCOW_FL)


def _explain(
    error: OSError, source_fd: int, target_fd: int, argument: bytes
) -> tuple[str, str | None]:
    """The reason and a hint; fs/remap_range.c and fs/btrfs/reflink.c return these."""
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
