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

from btrfs_ublk.errors import LeftoverError, UsageError
from btrfs_ublk.interrupts import deferred
from btrfs_ublk.resources.mountinfo import read_mountinfo
from btrfs_ublk.resources.uevents import wait_until

# linux/fs.h
_BLKROGET = 0x125E
_BLKSSZGET = 0x1268
_BLKGETSIZE64 = 0x80081272


def device_number(path: Path) -> tuple[int, int]:
    """(major, minor). Raises UsageError when the path is not a block device."""
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
    """/sys/dev/block/MAJOR:MINOR, resolved to the device's own directory."""
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
    """The device's capacity (BLKGETSIZE64)."""
    return _query(path, _BLKGETSIZE64, "=Q")


def logical_block_bytes(path: Path) -> int:
    """The smallest unit that the device addresses (BLKSSZGET)."""
    return _query(path, _BLKSSZGET, "=i")


def is_read_only(path: Path) -> bool:
    """True when writes are refused (BLKROGET)."""
    return _query(path, _BLKROGET, "=i") != 0


#: What open(2) says of a device that is going away, or has gone.
_GONE = (errno.ENOENT, errno.ENXIO, errno.ENODEV)


@deferred()
def is_claimed(path: Path) -> bool:
    """True when a file system or another driver holds the device, in any namespace.
    A device that has gone is not claimed.

    open(2), O_EXCL on a block device: EBUSY "if in use by the system (e.g., mounted)".
    NB: where nobody holds it, we do for a moment: a mount that comes just then fails.
    """
    try:
        # O_NONBLOCK: not to wait for a medium.
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
    """Nobody can mount the device meanwhile. Raises LeftoverError when somebody has."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LeftoverError(
            f"{path} cannot be claimed: {error.strerror}", hint="unmount it first"
        ) from error
    try:
        yield
    finally:
        os.close(fd)


def _is_in_btrfs(path: Path) -> bool:
    """True while a mounted btrfs has it, in any namespace: asked without opening it."""
    return any(Path("/sys/fs/btrfs").glob(f"*/devices/{sysfs_directory(path).name}"))


def users(path: Path) -> list[str]:
    """Who holds the device, for people: "mounted at /mnt (btrfs)", "held by /dev/dm-0".

    Sees only this mount namespace. NB: btrfs shows one of its devices as a mount's
    source, so mounts are looked for by all devices of the file system
    (/sys/fs/btrfs/FSID/devices).
    """
    sysfs = sysfs_directory(path)
    names = {sysfs.name}
    for member in Path("/sys/fs/btrfs").glob(f"*/devices/{sysfs.name}"):
        with suppress(OSError):  # it may be unmounted while we look
            names.update(sibling.name for sibling in member.parent.iterdir())
    found = []
    number = _device_text(path)
    for mount in read_mountinfo():
        source = Path(mount.source)
        is_member = source.parent == Path("/dev") and source.name in names
        if is_member or mount.device == number:
            found.append(f"mounted at {mount.target} ({mount.fs_type})")
    with suppress(OSError):
        for holder in (sysfs / "holders").iterdir():
            found.append(f"held by /dev/{holder.name}")
    return found


def wait_until_unused(path: Path, *, timeout_s: float) -> list[str]:
    """[] as soon as nothing claims the device, else who holds it, for people.

    Those who are seen are told at once. A claim without any is waited for: an unmount
    that is under way has left the list of mounts before it lets go of its devices. The
    device is opened only when nothing else speaks against it. A device that goes away
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


def wait_until_gone(path: Path, *, timeout_s: float) -> None:
    """Wait until the device's node has vanished. Raises TimeoutError."""
    wait_until(
        lambda: not path.exists() or None,
        timeout_s=timeout_s,
        what=f"{path} is still there",
    )
