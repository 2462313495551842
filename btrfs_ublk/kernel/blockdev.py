"""Facts about any block device: size, state, and who holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import LeftoverError, UsageError
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.users import command_of, links_of, pids
from btrfs_ublk.kernel.waiting import wait_until

# linux/fs.h
_BLKROGET = 0x125E
_BLKSSZGET = 0x1268
_BLKGETSIZE64 = 0x80081272


def device_number(path: Path) -> tuple[int, int]:
    """Return (major, minor). Raises UsageError when the path is no block device."""
    try:
        status = path.stat()
    except OSError as error:
        raise UsageError(f"block device {path}: {error.strerror}") from error
    if not stat.S_ISBLK(status.st_mode):
        raise UsageError(
            f"{path} is not a block device", hint="a file needs a loop device first"
        )
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def sysfs_directory(path: Path) -> Path:
    """Return the directory to which /sys/dev/block/MAJOR:MINOR leads."""
    major, minor = device_number(path)
    return Path(f"/sys/dev/block/{major}:{minor}").resolve()


@deferred()
def _query(path: Path, request: int, form: str) -> int:
    device_number(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        answer = fcntl.ioctl(fd, request, bytes(struct.calcsize(form)))
    finally:
        os.close(fd)
    value: int = struct.unpack(form, answer)[0]
    return value


def size_bytes(path: Path) -> int:
    """Return the device's capacity (BLKGETSIZE64)."""
    return _query(path, _BLKGETSIZE64, "=Q")


def size_in_sysfs(path: Path) -> int:
    """Return the capacity of a whole disk, without opening it."""
    sectors = (Path("/sys/block") / path.name / "size").read_text()
    return int(sectors) << 9


def logical_block_bytes(path: Path) -> int:
    """Return the size of the smallest unit that the device addresses (BLKSSZGET)."""
    return _query(path, _BLKSSZGET, "=i")


def is_read_only(path: Path) -> bool:
    """Return whether writes are refused (BLKROGET)."""
    return _query(path, _BLKROGET, "=i") != 0


#: Errors of open(2) for a device that is going away, or has gone.
_GONE = (errno.ENOENT, errno.ENXIO, errno.ENODEV)


@deferred()
def is_claimed(path: Path) -> bool:
    """Return whether a file system or another driver holds the device, in any
    namespace. A device that has gone is not claimed.

    open(2) with O_EXCL says EBUSY "if in use by the system (e.g., mounted)". NB: if
    nobody holds the device, this does for a moment, and a mount at that moment fails.
    """
    try:
        # With O_NONBLOCK, open(2) does not wait for a medium.
        fd = os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return True
        if error.errno in _GONE:
            return False
        raise
    os.close(fd)
    return False


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Keep others from mounting the device in the block. Raises LeftoverError if it is
    used."""
    flags = os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        with deferred():
            file = open(os.open(path, flags), "rb", buffering=0)
    except OSError as error:
        raise LeftoverError(
            f"{path} cannot be claimed: {error.strerror}", hint="unmount it first"
        ) from error
    with file:
        yield


def _is_in_btrfs(path: Path) -> bool:
    """Return whether a btrfs mounted in any namespace has it, without opening it."""
    return any(Path("/sys/fs/btrfs").glob(f"*/devices/{sysfs_directory(path).name}"))


def users(path: Path) -> list[str]:
    """Return the users of a device as texts: "mounted at /mnt (btrfs)", "held by …".

    Mounts are only those of this mount namespace. NB: btrfs shows one of its devices as
    the source of a mount, so this looks for all devices of the file system
    (/sys/fs/btrfs/FSID/devices).
    """
    sysfs = sysfs_directory(path)
    names = {sysfs.name}
    for member in Path("/sys/fs/btrfs").glob(f"*/devices/{sysfs.name}"):
        with suppress(OSError):  # it may be unmounted while we look
            names.update(sibling.name for sibling in member.parent.iterdir())
    found = []
    number = _device_text(path)
    sources = {f"/dev/{name}" for name in names}
    marks = [f" {each} " for each in (number, *sources)]
    for mount in read_mountinfo(marks=marks):
        if mount.source in sources or mount.device == number:
            found.append(f"mounted at {mount.target} ({mount.fs_type})")
    with suppress(OSError):
        for holder in (sysfs / "holders").iterdir():
            found.append(f"held by /dev/{holder.name}")
    return found


def wait_until_unused(path: Path, *, timeout_s: float) -> list[str]:
    """Return [] as soon as nothing claims the device, else its users as texts.

    If users() finds any, this returns at once. If not, but the device is claimed, this
    waits: an unmount in progress leaves the list of mounts before it releases its
    devices. The device is only opened when no btrfs has it. A device that goes away
    meanwhile is unused.
    """
    found: list[str] = []

    def settled() -> bool:
        found[:] = users(path)
        return bool(found) or not (_is_in_btrfs(path) or is_claimed(path))

    try:
        wait_until(settled, timeout_s=timeout_s, what=f"{path} is in use")
    except TimeoutError:
        return ["in use, perhaps mounted in another mount namespace"]
    except UsageError:
        if path.exists():
            raise
        return []
    return found


def openers(path: Path) -> list[str]:
    """Return texts on the processes that have the device's node open, as far as we may
    look. Those that opened it by another name are not found."""
    return [
        f"opened by process {pid} ({command_of(pid)})"
        for pid in pids()
        if any(what == str(path) for _, what in links_of(pid))
    ]


def _device_text(path: Path) -> str:
    major, minor = device_number(path)
    return f"{major}:{minor}"


def wait_for_node(path: Path, *, timeout_s: float) -> None:
    """Wait until the device's node is there. Raises TimeoutError."""
    wait_until(
        lambda: path.exists() or None,
        timeout_s=timeout_s,
        what=f"{path} did not appear",
    )
