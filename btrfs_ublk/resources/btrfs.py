"""btrfs' own ioctls (linux/btrfs.h) that no other resource covers."""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
from pathlib import Path
from typing import Literal

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.interrupts import deferred

_IOC_FORGET_DEV = 0x50009405
_IOC_ADD_DEV = 0x5000940A
_IOC_FS_INFO = 0x8400941F
_IOC_SUBVOL_CREATE = 0x5000940E
_IOC_SNAP_CREATE_V2 = 0x50009417
_IOC_QUOTA_CTL = 0xC0109428
_IOC_QUOTA_RESCAN_WAIT = 0x942E

#: struct btrfs_ioctl_vol_args: fd, name.
_VOL_ARGS = struct.Struct("=q4088s")
#: struct btrfs_ioctl_fs_info_args begins: max_id, num_devices, fsid; 1024 bytes in all.
_FS_INFO = struct.Struct("=QQ16s")
_FS_INFO_BYTES = 1024
#: struct btrfs_ioctl_vol_args_v2: fd, transid, flags, 32 unused bytes, name.
_VOL_ARGS_V2 = struct.Struct("=qQQ32x4040s")
#: struct btrfs_ioctl_quota_ctl_args: cmd, status.
_QUOTA_CTL = struct.Struct("=QQ")
#: BTRFS_QUOTA_CTL_ENABLE, BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA (Linux 6.7).
_QUOTA_COMMANDS = {"qgroup": 1, "squota": 4}

Accounting = Literal["qgroup", "squota"]


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


def create_subvolume(directory: Path, name: str) -> Path:
    """A new, empty subvolume in a directory. Raises BtrfsUblkError."""
    path = directory / name
    argument = _VOL_ARGS.pack(0, os.fsencode(name))
    _ioctl(directory, _IOC_SUBVOL_CREATE, argument, what=f"cannot create {path}")
    return path


def create_snapshot(subvolume: Path, directory: Path, name: str) -> Path:
    """A writable snapshot of a subvolume in a directory. Raises BtrfsUblkError."""
    path = directory / name
    # NB: not within deferred() for long: thousands are made in a row.
    fd = os.open(subvolume, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        argument = _VOL_ARGS_V2.pack(fd, 0, 0, os.fsencode(name))
        _ioctl(directory, _IOC_SNAP_CREATE_V2, argument, what=f"cannot create {path}")
    finally:
        os.close(fd)
    return path


def enable_quota(target: Path, accounting: Accounting) -> None:
    """Begin to account for who uses how much, and wait until that is known. Raises
    BtrfsUblkError: EINVAL for squota before Linux 6.7.
    """
    what = f"cannot enable {accounting} accounting on {target}"
    argument = _QUOTA_CTL.pack(_QUOTA_COMMANDS[accounting], 0)
    _ioctl(target, _IOC_QUOTA_CTL, argument, what=what)
    if accounting == "qgroup":
        _ioctl(target, _IOC_QUOTA_RESCAN_WAIT, b"", what=what)
