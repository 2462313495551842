"""btrfs' own ioctls (linux/btrfs.h) that no other resource covers."""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.interrupts import deferred

_IOC_FORGET_DEV = 0x50009405
_IOC_ADD_DEV = 0x5000940A
_IOC_FS_INFO = 0x8400941F

#: struct btrfs_ioctl_vol_args: fd, name.
_VOL_ARGS = struct.Struct("=q4088s")
#: struct btrfs_ioctl_fs_info_args begins: max_id, num_devices, fsid; 1024 bytes in all.
_FS_INFO = struct.Struct("=QQ16s")
_FS_INFO_BYTES = 1024


@deferred()
def _ioctl(path: Path, request: int, argument: bytes, *, what: str) -> bytes:
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # NB: above 1024 bytes fcntl.ioctl() wants a buffer that it can change.
        answer = bytearray(argument)
        fcntl.ioctl(fd, request, answer)
        return bytes(answer)
    except OSError as error:
        raise BtrfsUblkError(
            f"{what}: {error.strerror}",
            hint="see the kernel log: dmesg | grep -i btrfs",
        ) from error
    finally:
        if fd >= 0:
            os.close(fd)


def add_device(target: Path, device: Path) -> None:
    """Add a device to the file system mounted at ``target``; what it held is lost.

    On a mounted seed this makes the sprout: a new fsid, and all writes go to the
    device. Raises BtrfsUblkError.
    """
    _ioctl(
        target,
        _IOC_ADD_DEV,
        _VOL_ARGS.pack(0, os.fsencode(device)),
        what=f"cannot add {device} to the btrfs at {target}",
    )


def forget_device(device: Path) -> None:
    """Make the kernel drop what it remembers of an unmounted device.

    Raises BtrfsUblkError while it is mounted, or was never known (ENOENT).
    """
    _ioctl(
        Path("/dev/btrfs-control"),
        _IOC_FORGET_DEV,
        _VOL_ARGS.pack(0, os.fsencode(device)),
        what=f"cannot make btrfs forget {device}",
    )


def filesystem_uuid(target: Path) -> uuid.UUID:
    """The fsid of the btrfs that holds ``target``. Raises BtrfsUblkError."""
    answer = _ioctl(
        target,
        _IOC_FS_INFO,
        bytes(_FS_INFO_BYTES),
        what=f"{target} is on no btrfs",
    )
    return uuid.UUID(bytes=_FS_INFO.unpack_from(answer)[2])
