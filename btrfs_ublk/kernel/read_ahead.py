"""Set how much of a file a mounted btrfs reads ahead.

It is how much one page fault fetches (mm/readahead.c), and how much is in flight for a
process that reads a file from start to end. The setting of the file system counts, not
the one of the block device below. The default of btrfs is 4 MiB (fs/btrfs/disk-io.c).
"""

from __future__ import annotations

import errno
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, UsageError
from btrfs_ublk.kernel.btrfs import filesystem_uuid
from btrfs_ublk.units import BLOCK_BYTES, GIB, format_size

_MAX_BYTES = GIB


def check_read_ahead(read_ahead_bytes: int) -> None:
    """Raise UsageError for a size that cannot be set: it is not a multiple of the block
    size, or out of range. With 0, each page is read by itself."""
    if read_ahead_bytes % BLOCK_BYTES or not 0 <= read_ahead_bytes <= _MAX_BYTES:
        raise UsageError(
            f"the read-ahead cannot be {read_ahead_bytes} bytes",
            hint=f"it is a multiple of {BLOCK_BYTES} bytes, from 0 to "
            f"{format_size(_MAX_BYTES)}",
        )


def get_read_ahead(target: Path) -> int:
    """Return the read-ahead, in bytes, of the btrfs that holds ``target``. Raises
    BtrfsUblkError."""
    path = _attribute(target)
    try:
        return int(path.read_text()) << 10
    except (OSError, ValueError) as error:
        raise BtrfsUblkError(f"cannot read {path}: {error}") from error


def set_read_ahead(target: Path, read_ahead_bytes: int) -> None:
    """Set the read-ahead of the btrfs that holds ``target``, until it is unmounted.

    Raises UsageError (see check_read_ahead()), CapabilityError where this process may
    not write to /sys, and BtrfsUblkError when the kernel refuses or ignores it.
    """
    check_read_ahead(read_ahead_bytes)
    path = _attribute(target)
    try:
        path.write_text(str(read_ahead_bytes >> 10))
    except OSError as error:
        is_closed = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        raise (CapabilityError if is_closed else BtrfsUblkError)(
            f"cannot write {path}: {error.strerror}",
            hint="a container may have /sys read-only: leave read-ahead to the kernel "
            "(--read-ahead kernel, read_ahead_bytes=None)",
        ) from error
    found = get_read_ahead(target)
    if found != read_ahead_bytes:
        raise BtrfsUblkError(f"{path} is {found >> 10}, not {read_ahead_bytes >> 10}")


def _attribute(target: Path) -> Path:
    # NB: once a seed has a sprout, its own fsid is no longer in /sys/fs/btrfs.
    return Path("/sys/fs/btrfs", str(filesystem_uuid(target)), "bdi/read_ahead_kb")
