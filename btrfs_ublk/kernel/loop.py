"""Loop devices, made with the kernel's own interface (linux/loop.h, loop(4)).

Our devices have a random tag as their reference string (``lo_file_name``, which is for
free use: losetup(8) --loop-ref), so no other loop device on the same file, or with the
same number, is mistaken for ours.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, LeftoverError, UsageError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.kernel.waiting import wait_until
from btrfs_ublk.units import BLOCK_BYTES

KIND = "loop"

T = TypeVar("T")

_LOOP_CLR_FD = 0x4C01
_LOOP_GET_STATUS64 = 0x4C05
_LOOP_SET_CAPACITY = 0x4C07
_LOOP_CONFIGURE = 0x4C0A  # One step does all, so none is half made (5.8, 3448914e8cc5).
_LOOP_CTL_GET_FREE = 0x4C82

_LO_FLAGS_READ_ONLY = 1
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16

#: struct loop_info64: device, inode, rdevice, offset, sizelimit, number, encrypt_type,
#: encrypt_key_size, flags, file_name, crypt_name, encrypt_key, init[2].
_INFO = struct.Struct("=QQQQQIIII64s64s32sQQ")
#: struct loop_config: fd, block_size, info, reserved[8].
_CONFIG = struct.Struct(f"=II{_INFO.size}s64x")
assert _INFO.size == 232 and _CONFIG.size == 304

_ATTACH_TIMEOUT_S = 10.0
_DETACH_TIMEOUT_S = 10.0
_RETRY_S = 0.01

#: Errors of open(2) for a device that has gone.
_GONE = (errno.ENOENT, errno.ENXIO, errno.ENODEV)


@dataclass(frozen=True)
class LoopDevice:
    """A loop device in use."""

    path: Path
    backing_file: Path
    size_bytes: int
    read_only: bool


@contextmanager
def loop_device(
    backing_file: StrPath,
    *,
    read_only: bool = False,
    direct_io: bool = False,
    block_bytes: int = BLOCK_BYTES,
    offset_bytes: int = 0,
    size_bytes: int | None = None,
    lifeline: bool = False,
    ledger: Ledger | None = None,
) -> Iterator[LoopDevice]:
    """Attach a file to a free loop device; detach it, and wait, when the block is left.

    ``offset_bytes`` and ``size_bytes`` (default: to the end) choose a part of the file.
    Both must be multiples of ``block_bytes``, and so must the file's size if they are
    not given: the kernel would silently cut the rest off. ``direct_io`` bypasses the
    page cache of the file below. ``lifeline`` is as for attach(). Raises LeftoverError
    when the device is still mounted at the end; it is not detached then.
    """
    with deferred():
        # The daemon, which calls only attach(), needs none of this.
        from btrfs_ublk.base.capabilities import LOOP, ROOT, require
    require(ROOT, LOOP)
    ledger = ledger or process_ledger()
    backing_file = Path(backing_file).resolve()
    with open_backing_file(backing_file, read_only=read_only) as backing:
        with ledger.holding(KIND, backing_file=str(backing_file)) as entry:
            with deferred():
                device = attach(
                    backing,
                    backing_file,
                    entry.tag,
                    read_only=read_only,
                    direct_io=direct_io,
                    block_bytes=block_bytes,
                    offset_bytes=offset_bytes,
                    size_bytes=size_bytes,
                    lifeline=lifeline,
                )
                ledger.amend(entry, path=str(device.path))
            try:
                yield device
            finally:
                if not ledger.is_ours:
                    _cut_lifeline(entry.tag)  # It then lives as long as a mount of it.


def attach(
    backing: FileIO,
    backing_file: Path,
    tag: str,
    *,
    read_only: bool,
    direct_io: bool,
    block_bytes: int = BLOCK_BYTES,
    offset_bytes: int = 0,
    size_bytes: int | None = None,
    lifeline: bool = False,
) -> LoopDevice:
    """Do what loop_device() does, for callers that cannot use a ``with`` block.

    ``tag`` (16 random hex digits) tells the device from all others: detach() needs it.
    Callers with a ledger first make an entry of KIND, with a ``backing_file``, use its
    tag, and amend its ``path`` afterwards. ``lifeline``: the device is also detached
    when we die, or later, as soon as nobody has it mounted or open.
    """
    file_bytes = os.fstat(backing.fileno()).st_size
    length_bytes = size_bytes or file_bytes - offset_bytes
    _check_geometry(backing_file, file_bytes, offset_bytes, length_bytes, block_bytes)
    info = _INFO.pack(
        *(0, 0, 0, offset_bytes, size_bytes or 0, 0, 0, 0),
        (read_only and _LO_FLAGS_READ_ONLY)
        | (direct_io and _LO_FLAGS_DIRECT_IO)
        | (lifeline and _LO_FLAGS_AUTOCLEAR),
        *(_reference(tag).encode(), b"", b"", 0, 0),
    )
    with deferred():
        path, opened = _attach(_CONFIG.pack(backing.fileno(), block_bytes, info))
        try:
            _check_direct_io(path, wanted=direct_io)
        except BaseException:
            fcntl.ioctl(opened, _LOOP_CLR_FD)
            opened.close()
            raise
        if lifeline:
            _lifelines[tag] = opened
        else:
            opened.close()
    return LoopDevice(path, backing_file, length_bytes, read_only)


def grow(path: Path, tag: str | None, file: Path) -> None:
    """Give the device the size of its file, ``file``, if that has become larger. It may
    be mounted meanwhile. Without a tag, the device must be on that very file. Raises
    BtrfsUblkError."""
    size_bytes = file.stat().st_size
    if blockdev.size_bytes(path) >= size_bytes:
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = file.stat()
        if (
            _backing_of(fd) != (status.st_dev, status.st_ino)
            if tag is None
            else _reference_of(fd) != _reference(tag)
        ):
            raise BtrfsUblkError(f"{path} is another's: its size is left as it is")
        fcntl.ioctl(fd, _LOOP_SET_CAPACITY)
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot make {path} {size_bytes} bytes large: {error.strerror}"
        ) from error
    finally:
        os.close(fd)
    if (has_bytes := blockdev.size_bytes(path)) != size_bytes:
        raise BtrfsUblkError(f"{path} has {has_bytes} bytes, its file {size_bytes}")


def has_tag(path: Path, tag: str) -> bool:
    """Return whether the loop device ``path`` was attached with that tag."""
    return _status_at(path, _reference_of) == _reference(tag)


def names_tag(path: Path, tag: str) -> bool:
    """Return whether ``path`` is a loop device on a file with the tag in its name. NB:
    this only reads sysfs, so that it never waits for the file's file system."""
    try:
        return tag in (_sysfs(path) / "backing_file").read_text(errors="replace")
    except OSError:
        return False


def find_by_tag(tag: str) -> Path | None:
    """Return the loop device that any process attached with that tag, to a file that
    has the tag in its name; None when there is none."""
    for directory in Path("/sys/block").glob("loop*/loop"):
        path = Path("/dev") / directory.parent.name
        # NB: LOOP_GET_STATUS64 asks the file system of the device's file. If the device
        # is not ours, that may never answer, so sysfs is asked first.
        if names_tag(path, tag) and has_tag(path, tag):
            return path
    return None


def is_on(path: Path, file: Path) -> bool:
    """Return whether the loop device ``path`` is on that very file."""
    status = file.stat()
    return _status_at(path, _backing_of) == (status.st_dev, status.st_ino)


def _status_at(path: Path, part: Callable[[int], T]) -> T | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    try:
        return part(fd)
    finally:
        os.close(fd)


#: By tag, open files that keep our devices with LO_FLAGS_AUTOCLEAR: the kernel detaches
#: such a device when it is neither open nor mounted any more.
_lifelines: dict[str, FileIO] = {}


def _cut_lifeline(tag: str) -> None:
    lifeline = _lifelines.pop(tag, None)
    if lifeline is not None:
        lifeline.close()


def _after_fork_in_child() -> None:
    # NB: a forked child with these open would keep the devices of a dead parent.
    for tag in list(_lifelines):
        _cut_lifeline(tag)


os.register_at_fork(after_in_child=_after_fork_in_child)


def open_backing_file(path: Path, *, read_only: bool) -> FileIO:
    """Open a backing file. Raises UsageError, which says why it cannot be opened."""
    try:
        return open(path, "rb" if read_only else "r+b", buffering=0)
    except OSError as error:
        raise UsageError(f"backing file {path}: {error.strerror}") from error


def _check_geometry(
    path: Path, file_bytes: int, offset_bytes: int, length_bytes: int, block_bytes: int
) -> None:
    """Raise UsageError for sizes that the kernel would silently round down, and for
    what is not a part of the file."""
    for what, value in (("offset", offset_bytes), ("length", length_bytes)):
        if value % block_bytes:
            raise UsageError(
                f"loop device on {path}: {what} {value} bytes is not a multiple of "
                f"{block_bytes} bytes",
                hint=f"truncate -s %{block_bytes} the file, or choose another part",
            )
    end_bytes = offset_bytes + length_bytes
    if offset_bytes < 0 or length_bytes <= 0 or end_bytes > file_bytes:
        raise UsageError(
            f"loop device on {path}: [{offset_bytes}, {end_bytes}) is not a part of "
            f"its {file_bytes} bytes"
        )


def _reference(tag: str) -> str:
    return f"btrfs-ublk:{tag}"


def _attach(config: bytes) -> tuple[Path, FileIO]:
    """Configure a free device, and return it and an open file of it. Another free one
    is tried whenever another process was quicker. Raises BtrfsUblkError."""
    deadline_s = time.monotonic() + _ATTACH_TIMEOUT_S
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            path = Path("/dev/loop-control")
            try:
                path = Path(f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}")
                blockdev.wait_for_node(path, timeout_s=2)
                return path, _configure(path, config)
            except OSError as error:
                # EBUSY: another process took it. EAGAIN: it still has old pages.
                busy = error.errno in (errno.EBUSY, errno.EAGAIN)
                if not busy or time.monotonic() > deadline_s:
                    raise BtrfsUblkError(
                        f"cannot set up {path}: {error.strerror or error}",
                        hint=f"see the kernel log: dmesg | grep {path.name}",
                    ) from error
                time.sleep(_RETRY_S)
    finally:
        os.close(control)


def _configure(path: Path, config: bytes) -> FileIO:
    device = open(path, "r+b", buffering=0)
    try:
        fcntl.ioctl(device, _LOOP_CONFIGURE, config)
    except BaseException:
        device.close()
        raise
    return device


def _check_direct_io(path: Path, *, wanted: bool) -> None:
    # The kernel falls back to buffered I/O without an error.
    if wanted and not _uses_direct_io(path):
        raise CapabilityError(
            f"{path}: the file below does not allow direct I/O with these blocks",
            hint="use another file system, a larger block size, or no direct I/O",
        )


def _uses_direct_io(path: Path) -> bool:
    """Return whether direct I/O is on; False when the device has no backing file."""
    try:
        return (_sysfs(path) / "dio").read_text().strip() == "1"
    except OSError:
        return False


def _sysfs(path: Path) -> Path:
    """Return a directory that exists while the device has a backing file."""
    return Path("/sys/block") / path.name / "loop"


def _reference_of(fd: int) -> str | None:
    fields = _fields_of(fd)
    if fields is None:
        return None
    name: bytes = fields[9]
    return name.rstrip(b"\0").decode(errors="replace")


def _backing_of(fd: int) -> tuple[int, int] | None:
    """Return device and inode of the backing file; None when there is none."""
    fields = _fields_of(fd)
    return None if fields is None else (fields[0], fields[1])


def _fields_of(fd: int) -> tuple[Any, ...] | None:
    """Return the fields of struct loop_info64; None without a backing file."""
    try:
        return _INFO.unpack(fcntl.ioctl(fd, _LOOP_GET_STATUS64, bytes(_INFO.size)))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


@remover(KIND, reuses_places=True)
def _detach_entered(entry: Entry) -> bool:
    known = entry.details.get("path")
    devices = (
        [Path(known)]
        if known
        else [
            Path("/dev") / directory.parent.name
            for directory in Path("/sys/block").glob("loop*/loop")
        ]
    )
    was_there = any([_detach_if_ours(path, entry.tag) for path in devices])
    _cut_lifeline(entry.tag)  # also when the device is not the one that was entered
    return was_there


def detach(path: Path, tag: str) -> bool:
    """Detach the device if it is the one with that tag, and wait until it is detached.

    Return whether it was that one. Raises LeftoverError, which names the users, while
    somebody has it mounted or open.
    """
    was_there = _detach_if_ours(path, tag)
    _cut_lifeline(tag)
    return was_there


def _detach_if_ours(path: Path, tag: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    try:
        if _reference_of(fd) != _reference(tag):
            return False
        users = blockdev.wait_until_unused(path, timeout_s=_DETACH_TIMEOUT_S)
        if users:
            raise LeftoverError(
                f"{path} (on {_backing_name(path)}) is not detached: "
                f"{'; '.join(users)}",
                hint="unmount it first",
            )
        sequence = _disk_sequence(path)
        fcntl.ioctl(fd, _LOOP_CLR_FD)
    finally:
        # NB: the kernel detaches at the last close, which may be one of blkid, say.
        os.close(fd)
    _cut_lifeline(tag)
    try:
        wait_until(
            lambda: not _sysfs(path).exists() or _disk_sequence(path) != sequence,
            timeout_s=_DETACH_TIMEOUT_S,
            what=f"{path} is still attached",
        )
    except TimeoutError as error:
        raise LeftoverError(f"{error}: some process has it open") from error
    return True


def _backing_name(path: Path) -> str:
    try:
        return (_sysfs(path) / "backing_file").read_text().strip()
    except OSError:
        return "no file"


def _disk_sequence(path: Path) -> str | None:
    """Return a text that changes with every attach and detach; None before 5.15."""
    try:
        return (Path("/sys/block") / path.name / "diskseq").read_text()
    except OSError:
        return None
