"""Loop devices, straight from the kernel's interface (linux/loop.h, loop(4)).

A device carries a random tag as its reference string (``lo_file_name``, which is free
for that: losetup(8) --loop-ref), so no other loop device on the same file, or with its
number, is mistaken for ours. The tag also stays when the device moves to another file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from btrfs_ublk.capabilities import LOOP, ROOT, require
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, LeftoverError, UsageError
from btrfs_ublk.interrupts import deferred
from btrfs_ublk.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.resources import blockdev
from btrfs_ublk.resources.uevents import wait_until
from btrfs_ublk.units import BLOCK_BYTES

KIND = "loop"

T = TypeVar("T")

_LOOP_CLR_FD = 0x4C01
_LOOP_GET_STATUS64 = 0x4C05
_LOOP_CHANGE_FD = 0x4C06
_LOOP_SET_CAPACITY = 0x4C07
_LOOP_SET_DIRECT_IO = 0x4C08
_LOOP_CONFIGURE = 0x4C0A  # Linux 5.8, 3448914e8cc5: one step, nothing half made
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

#: What open(2) says of a device that has gone.
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
    backing_file: Path,
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

    ``offset_bytes`` and ``size_bytes`` (default: to the end) choose a part of the file;
    both, and the file's size, must be multiples of ``block_bytes``, since the kernel
    would silently cut the rest off. ``direct_io`` bypasses the page cache of the file
    below. A device that is still mounted at the end is not detached: LeftoverError.
    ``lifeline`` is attach()'s.
    """
    require(ROOT, LOOP)
    ledger = ledger or process_ledger()
    backing_file = backing_file.resolve()
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
                    _cut_lifeline(entry.tag)  # it is to outlive us, as long as a mount


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
    """The middle of loop_device(), for owners who cannot use a ``with`` block.

    ``tag`` (16 random hex digits) tells the device from all others: detach() and
    change_backing_file() want it. Owners with a ledger make an entry of KIND before,
    with a ``backing_file``, whose tag it is, and amend its ``path`` after.
    ``lifeline``: the device is also detached when we die, or as soon as nobody has it
    mounted or open after that.
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


def change_backing_file(path: Path, tag: str, backing: FileIO) -> None:
    """Move a read-only device to another open file of the same size, under whoever has
    it mounted; direct I/O stays on if it was.

    Waits for what is in flight, so the old file's server must be there, or gone for
    good. Raises BtrfsUblkError when the device is not the one with that tag, and
    UsageError when the kernel cannot move it.
    """
    direct_io = _uses_direct_io(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _reference_of(fd) != _reference(tag):
            raise BtrfsUblkError(f"{path} is another's: it is not moved to a new file")
        _check_change(path, backing)
        try:
            fcntl.ioctl(fd, _LOOP_CHANGE_FD, backing.fileno())
            # Some kernels forget it here.
            if direct_io and not _uses_direct_io(path):
                fcntl.ioctl(fd, _LOOP_SET_DIRECT_IO, 1)
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot move {path} to another file: {error.strerror}",
                hint=f"see the kernel log: dmesg | grep {path.name}",
            ) from error
    finally:
        os.close(fd)
    _check_direct_io(path, wanted=direct_io)


def grow(path: Path, tag: str, file: Path) -> None:
    """Give the device the size of its file, ``file``, where that has become larger;
    whoever has it mounted goes on. Raises BtrfsUblkError.
    """
    size_bytes = file.stat().st_size
    if blockdev.size_bytes(path) >= size_bytes:
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _reference_of(fd) != _reference(tag):
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


def _check_change(path: Path, backing: FileIO) -> None:
    """Raise UsageError for what the kernel would answer with a bare EINVAL."""
    if not blockdev.is_read_only(path):
        raise UsageError(
            f"{path} is writable: the kernel moves only read-only loop devices to "
            "another file",
            hint="a writable device lives on with its server's connection only "
            "(recovery by reissue)",
        )
    old_bytes = blockdev.size_bytes(path)
    new_bytes = os.fstat(backing.fileno()).st_size
    if old_bytes != new_bytes:
        raise UsageError(
            f"{path} has {old_bytes} bytes: it cannot be moved to a file of {new_bytes}"
        )


def has_tag(path: Path, tag: str) -> bool:
    """Whether the loop device ``path`` was attached with that tag."""
    return _status_at(path, _reference_of) == _reference(tag)


def find_by_tag(tag: str) -> Path | None:
    """The loop device that was attached with that tag, whoever did it, to a file that
    has the tag in its name.
    """
    for directory in Path("/sys/block").glob("loop*/loop"):
        # NB: asking a device (LOOP_GET_STATUS64) asks the file system of its file,
        # which may be another's, and not answer.
        with suppress(OSError):
            if tag not in (directory / "backing_file").read_text(errors="replace"):
                continue
        path = Path("/dev") / directory.parent.name
        if has_tag(path, tag):
            return path
    return None


def is_on(path: Path, file: Path) -> bool:
    """Whether the loop device ``path`` stands on that very file."""
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


#: Our own hold on devices that the kernel detaches when nobody holds them any more
#: (LO_FLAGS_AUTOCLEAR), by their tags.
_lifelines: dict[str, FileIO] = {}


def _cut_lifeline(tag: str) -> None:
    lifeline = _lifelines.pop(tag, None)
    if lifeline is not None:
        lifeline.close()


def _after_fork_in_child() -> None:
    # NB: a forked child that kept them would keep the devices of a dead parent.
    for tag in list(_lifelines):
        _cut_lifeline(tag)


os.register_at_fork(after_in_child=_after_fork_in_child)


def open_backing_file(path: Path, *, read_only: bool) -> FileIO:
    """Raise UsageError, which says why, when it cannot be opened."""
    try:
        return open(path, "rb" if read_only else "r+b", buffering=0)
    except OSError as error:
        raise UsageError(f"backing file {path}: {error.strerror}") from error


def _check_geometry(
    path: Path, file_bytes: int, offset_bytes: int, length_bytes: int, block_bytes: int
) -> None:
    """Raise UsageError for what the kernel would round down without a word."""
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
    """Configure a free device, trying others for as long as someone is quicker; it is
    open.
    """
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
                # EBUSY: another process took it; EAGAIN: its old pages are still going.
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
    """False as well when the device has no backing file."""
    try:
        return (_sysfs(path) / "dio").read_text().strip() == "1"
    except OSError:
        return False


def _sysfs(path: Path) -> Path:
    """Exists while the device has a backing file."""
    return Path("/sys/block") / path.name / "loop"


def _reference_of(fd: int) -> str | None:
    fields = _fields_of(fd)
    if fields is None:
        return None
    name: bytes = fields[9]
    return name.rstrip(b"\0").decode(errors="replace")


def _backing_of(fd: int) -> tuple[int, int] | None:
    """Device and inode of the file below."""
    fields = _fields_of(fd)
    return None if fields is None else (fields[0], fields[1])


def _fields_of(fd: int) -> tuple[Any, ...] | None:
    """Of struct loop_info64; None when the device has no backing file."""
    try:
        return _INFO.unpack(fcntl.ioctl(fd, _LOOP_GET_STATUS64, bytes(_INFO.size)))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


@remover(KIND)
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
    _cut_lifeline(entry.tag)  # of a device that is no longer what was entered
    return was_there


def detach(path: Path, tag: str) -> bool:
    """Detach the device if it is the one with that tag, and wait until it is.

    True when it was. Raises LeftoverError, naming who, while somebody has it mounted
    or open.
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
        # NB: the kernel detaches at the last close; that may be another's (blkid).
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
    """Changes with every attach and detach; None before Linux 5.15."""
    try:
        return (Path("/sys/block") / path.name / "diskseq").read_text()
    except OSError:
        return None
