"""Ioctls of btrfs (linux/btrfs.h) that no other module of this package uses."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.helpers import ADD_DEVICE, helper_path
from btrfs_ublk.base.ledger import Ledger, process_ledger
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import run
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError

#: btrfs needs room for its own chunks; with less than this, `device add` fails.
MIN_WRITABLE_BYTES = 64 << 20

_IOC_FORGET_DEV = 0x50009405
_IOC_RESIZE = 0x50009403
_IOC_DEV_INFO = 0xD000941E
_IOC_FS_INFO = 0x8400941F
_IOC_SUBVOL_CREATE = 0x5000940E
_IOC_DEFAULT_SUBVOL = 0x40089413
_IOC_TREE_SEARCH = 0xD0009411
_IOC_SYNC = 0x9408
_IOC_START_SYNC = 0x80089418
_IOC_INO_LOOKUP = 0xD0009412
_IOC_QUOTA_CTL = 0xC0109428
_IOC_SNAP_CREATE = 0x50009417
_IOC_SNAP_DESTROY = 0x5000940F
_IOC_SNAP_DESTROY_V2 = 0x5000943F
_IOC_SUBVOL_GETFLAGS = 0x80089419
_IOC_SUBVOL_SETFLAGS = 0x4008941A
_IOC_SUBVOL_INFO = 0x81F8943C

#: struct btrfs_ioctl_vol_args: fd, name.
_VOL_ARGS = struct.Struct("=q4088s")
#: struct btrfs_ioctl_vol_args_v2: fd, transaction, flags, size and address of a struct
#: btrfs_qgroup_inherit, 16 unused bytes, name.
_VOL_ARGS_V2 = struct.Struct("=qQQQQ16x4040s")
#: The same with the number of a subvolume instead of a name.
_VOL_ARGS_OF_NUMBER = struct.Struct("=8xQQ32xQ4032x")
#: BTRFS_SUBVOL_RDONLY, BTRFS_SUBVOL_QGROUP_INHERIT, BTRFS_SUBVOL_SPEC_BY_ID
_READ_ONLY = 1 << 1
_INHERIT = 1 << 2
_BY_NUMBER = 1 << 4
#: struct btrfs_qgroup_inherit: flags, three counts, and a struct btrfs_qgroup_limit:
#: flags, most bytes, three other limits. The flags are BTRFS_QGROUP_INHERIT_SET_LIMITS
#: and BTRFS_QGROUP_LIMIT_MAX_RFER.
_INHERITED = struct.Struct("=Q24xQQ24x")
_SET_LIMITS = 1
_LIMIT_MOST = 1
#: struct btrfs_ioctl_get_subvol_info_args: id, name, 32 unused bytes, its UUID, and
#: that of what it is a snapshot of; 504 bytes in all.
_SUBVOL_INFO = struct.Struct("=Q256x32x16s16s")
_SUBVOL_INFO_BYTES = 504
#: In the same: flags, the first of them BTRFS_ROOT_SUBVOL_RDONLY, and the seconds of
#: its last change and of its making (ctime, otime).
_SUBVOL_FLAGS = struct.Struct("=288xQ")
_SUBVOL_TIMES = struct.Struct("=376xQ8xQ")
#: struct btrfs_ioctl_ino_lookup_args: tree, object id, name.
_INO_LOOKUP = struct.Struct("=QQ4080x")
#: struct btrfs_ioctl_quota_ctl_args: command, status.
_QUOTA_CTL = struct.Struct("=QQ")
_ENABLE_SIMPLE_QUOTA = 4
#: struct btrfs_ioctl_fs_info_args begins: max_id, num_devices, fsid; 1024 bytes in all.
_FS_INFO = struct.Struct("=QQ16s")
_FS_INFO_BYTES = 1024
#: struct btrfs_ioctl_dev_info_args: devid, uuid, bytes_used, total_bytes, fsid, 3016
#: unused bytes, path.
_DEV_INFO = struct.Struct("=Q16sQQ16s3016x1024s")
assert _DEV_INFO.size == 4096

#: struct btrfs_ioctl_search_args: tree, least and greatest object id, offset and
#: transaction, least and greatest type, how many items, 36 unused bytes; 4096 in all.
_SEARCH = struct.Struct("=QQQQQQQIII36x")
_SEARCH_BYTES = 4096
_EVERY = 2**64 - 1
_MOST_ITEMS = 1 << 10  # more than fit into an answer
#: struct btrfs_ioctl_search_header: transaction, object id, offset, type, length.
_FOUND = struct.Struct("=QQQII")
#: struct btrfs_inode_item begins: generation.
_INODE_ITEM_KEY = 1
_GENERATION = struct.Struct("<Q")
_ROOT_TREE = 1
_ROOT_BACKREF_KEY = 144
_ROOT_REF_KEY = 156
#: struct btrfs_root_ref: inode of the directory, sequence, length of the name; the name
#: follows.
_ROOT_REF = struct.Struct("<QQH")
_QUOTA_TREE = 8
_QGROUP_INFO_KEY = 242
#: struct btrfs_qgroup_info_item begins: generation, bytes that are charged.
_QGROUP_INFO = struct.Struct("<QQ")
_QGROUP_LIMIT_KEY = 244
#: struct btrfs_qgroup_limit_item begins: flags, most bytes.
_QGROUP_LIMIT = struct.Struct("<QQ")
#: struct file_handle, and in it struct btrfs_fid without a parent: object id, tree,
#: generation (fs/btrfs/export.h).
_HANDLE = struct.Struct("=Ii")
_FID = struct.Struct("=QQI")
_FILEID_BTRFS_WITHOUT_PARENT = 0x4D

#: BTRFS_FS_TREE_OBJECTID: the subvolume that all others are in.
TOP_LEVEL = 5
#: BTRFS_FIRST_FREE_OBJECTID: the inode number of each subvolume's top directory.
_TOP_INODE = 256
#: The helper commits about four transactions, and each waits for the disk.
_ADD_DEVICE_TIMEOUT_S = 600.0
_EXIT_FAILED = 1
_EXIT_USAGE = 2


@deferred()
def _ioctl(path: Path, request: int, argument: bytes, *, what: str) -> bytes:
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # NB: fcntl.ioctl() takes more than 1024 bytes only in a mutable buffer.
        answer = bytearray(argument)
        fcntl.ioctl(fd, request, answer)
        return bytes(answer)
    except OSError as error:
        # The kernel's log says nothing of a path that is missing or refused.
        told = fd >= 0 and error.errno not in (errno.ENOENT, errno.EPERM, errno.EACCES)
        raise BtrfsUblkError(
            f"{what}: {error.strerror}",
            hint="see the kernel log: dmesg | grep -i btrfs" if told else None,
        ) from error
    finally:
        if fd >= 0:
            os.close(fd)


def add_device(target: Path, device: Path, *, ledger: Ledger | None = None) -> None:
    """Add a device to the file system mounted at ``target``; what it held is lost.

    On a mounted seed this makes the sprout: a new fsid, and all writes go to the
    device. A helper does it in a process that goes on when this one is killed: the
    kernel stops the machine otherwise. ``ledger``, which lists mount and device, stays
    locked until the helper ends, so that ``gc`` waits. Raises BtrfsUblkError.
    """
    ledger = ledger or process_ledger()
    with deferred():
        done = run(
            [helper_path(ADD_DEVICE), device, target],
            timeout_s=_ADD_DEVICE_TIMEOUT_S,
            ok_statuses=(0, _EXIT_FAILED, _EXIT_USAGE),
            keep_open_fds=[ledger.fileno()],
        )
    if done.returncode != 0:
        words = done.stderr.strip().removeprefix(f"{ADD_DEVICE}: error: ")
        message, _, hint = words.partition("\n  hint: ")
        raise BtrfsUblkError(message, hint=hint or None)


def grow_filesystem(target: Path, device: Path, size_bytes: int) -> None:
    """Make the btrfs mounted at ``target`` use at least ``size_bytes`` of one of its
    devices, which must be that large. Raises BtrfsUblkError."""
    number, used_bytes = _device_of(target, device)
    if used_bytes >= size_bytes:
        return
    what = f"cannot grow the btrfs at {target} to {size_bytes} bytes of {device}"
    argument = _VOL_ARGS.pack(0, f"{number}:{size_bytes}".encode())
    _ioctl(target, _IOC_RESIZE, argument, what=what)
    # NB: if another operation excludes this one, the ioctl returns a positive number.
    _, used_bytes = _device_of(target, device)
    if used_bytes < size_bytes:
        raise BtrfsUblkError(
            f"{what}: it uses {used_bytes}",
            hint="is it being balanced? btrfs balance status; then try again",
        )


def _device_of(target: Path, device: Path) -> tuple[int, int]:
    """Return the id that a mounted btrfs has for a device, and how many bytes it uses.
    Raises BtrfsUblkError."""
    try:
        number, _, total_bytes = devices_of(target)[device]
    except KeyError:
        raise BtrfsUblkError(
            f"{device} is no device of the btrfs at {target}"
        ) from None
    return number, total_bytes


def devices_of(target: Path) -> dict[Path, tuple[int, int, int]]:
    """Return the devices of a mounted btrfs, each with its id, how many bytes belong to
    chunks, and how many it has. Raises BtrfsUblkError."""
    what = f"cannot list the devices of the btrfs at {target}"
    answer = _ioctl(target, _IOC_FS_INFO, bytes(_FS_INFO_BYTES), what=what)
    devices = {}
    for number in range(1, _FS_INFO.unpack_from(answer)[0] + 1):
        asked = _DEV_INFO.pack(number, b"", 0, 0, b"", b"")
        with suppress(BtrfsUblkError):  # the device of this id was removed
            found = _DEV_INFO.unpack(_ioctl(target, _IOC_DEV_INFO, asked, what=what))
            path = Path(os.fsdecode(found[5].rstrip(b"\0")))
            devices[path] = (number, found[2], found[3])
    return devices


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
    """Return the fsid of the btrfs that holds ``target``. Raises BtrfsUblkError."""
    answer = _ioctl(
        target, _IOC_FS_INFO, bytes(_FS_INFO_BYTES), what=f"{target} is on no btrfs"
    )
    return uuid.UUID(bytes=_FS_INFO.unpack_from(answer)[2])


def create_subvolume(directory: Path, name: str) -> Path:
    """Make an empty subvolume in a directory. Raises BtrfsUblkError."""
    path = directory / name
    argument = _VOL_ARGS.pack(0, os.fsencode(name))
    _ioctl(directory, _IOC_SUBVOL_CREATE, argument, what=f"cannot create {path}")
    return path


def create_snapshot(
    subvolume: Path,
    directory: Path,
    name: str,
    *,
    read_only: bool = False,
    quota_bytes: int | None = None,
) -> Path:
    """Make a snapshot of a subvolume in a directory of the same file system; it is
    writable unless ``read_only``. ``quota_bytes`` limits what it may be charged for,
    from the beginning; see enable_simple_quota(). Raises BtrfsUblkError."""
    path = directory / name
    what = f"cannot make {path}, a snapshot of {subvolume}"
    flags = _READ_ONLY if read_only else 0
    inherited = ctypes.create_string_buffer(0)
    if quota_bytes is not None:
        flags |= _INHERIT
        limit = _INHERITED.pack(_SET_LIMITS, _LIMIT_MOST, quota_bytes)
        inherited = ctypes.create_string_buffer(limit, len(limit))
    try:
        with deferred():
            source = os.open(subvolume, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                place = (len(inherited), ctypes.addressof(inherited))
                argument = _VOL_ARGS_V2.pack(
                    source, 0, flags, *place, os.fsencode(name)
                )
                _ioctl(directory, _IOC_SNAP_CREATE, argument, what=what)
            finally:
                os.close(source)
    except OSError as error:
        raise BtrfsUblkError(f"{what}: {error.strerror}") from error
    return path


def create_deep_snapshot(
    subvolume: Path, directory: Path, name: str, *, quota_bytes: int | None = None
) -> Path:
    """Make a writable snapshot of a subvolume, as create_snapshot() does, and in it
    snapshots of those that were made in it, writable or not as they are, with their
    limits. Each is of a moment of its own. Raises BtrfsUblkError, OSError."""
    made = create_snapshot(subvolume, directory, name, quota_bytes=quota_bytes)
    own = subvolume_id(made)
    for _, number, inode, child in list(_children(subvolume, subvolume_id(subvolume))):
        what = f"cannot make a snapshot of subvolume {number}, which is in {subvolume}"
        with deferred(), ExitStack() as opened:
            # NB: inode numbers are those of the original. No path is followed.
            place = _open_inode(made, inode, own, what=what)
            opened.callback(os.close, place)
            source = _open_inode(made, _TOP_INODE, number, what=what)
            opened.callback(os.close, source)
            before, original = os.fstat(place), Path(f"/proc/self/fd/{source}")
            os.rmdir(child, dir_fd=place)  # where it was is an empty directory
            copy = create_deep_snapshot(
                original,
                Path(f"/proc/self/fd/{place}"),
                os.fsdecode(child),
                quota_bytes=quota_limit_if_any(original, number),
            )
            if _SUBVOL_FLAGS.unpack_from(_subvolume_info(original))[0] & 1:
                set_read_only(copy)
            os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    return made


def delete_subvolume(path: Path) -> None:
    """Delete a subvolume with all that is in it, but no other subvolume. The kernel
    frees the space later. Raises BtrfsUblkError, also while it is mounted here."""
    argument = _VOL_ARGS.pack(0, os.fsencode(path.name))
    _ioctl(path.parent, _IOC_SNAP_DESTROY, argument, what=f"cannot delete {path}")


def delete_subvolumes(path: Path) -> None:
    """Delete a subvolume, also one that is read-only, with those in it. Raises
    BtrfsUblkError."""
    try:
        delete_subvolume(path)
    except BtrfsUblkError as error:
        if getattr(error.__cause__, "errno", None) != errno.ENOTEMPTY:
            raise
        set_read_only(path, False)  # else nothing in it can be deleted
        delete_nested_subvolumes(path)
        delete_subvolume(path)


def delete_subvolume_number(target: Path, number: int) -> None:
    """Do the same with a subvolume of the btrfs at ``target``, wherever it is: no path
    is followed. Raises BtrfsUblkError."""
    what = f"cannot delete subvolume {number} of the btrfs at {target}"
    with deferred():
        fd = _open_inode(target, _TOP_INODE, number, what=what)
        try:
            subvolume = Path(f"/proc/self/fd/{fd}")
            set_read_only(subvolume, False)  # else nothing in it can be deleted
            delete_nested_subvolumes(subvolume)
        finally:
            os.close(fd)
    argument = _VOL_ARGS_OF_NUMBER.pack(0, _BY_NUMBER, number)
    _ioctl(target, _IOC_SNAP_DESTROY_V2, argument, what=what)


def delete_nested_subvolumes(subvolume: Path) -> None:
    """Delete the subvolumes that were made in one, and those in them. Raises
    BtrfsUblkError.

    The kernel lists them, and opens the directory of each by its inode number. So no
    path is followed, and who can write there cannot lead this anywhere else.
    """
    found = [(0, subvolume_id(subvolume), 0, b"")]
    for _, parent, _, _ in found:
        found += _children(subvolume, parent)
    for parent, number, inode, name in reversed(found[1:]):
        what = f"cannot delete subvolume {number} in {subvolume}"
        with deferred():
            directory = _open_inode(subvolume, inode, parent, what=what)
            try:
                path = Path(f"/proc/self/fd/{directory}")
                _ioctl(path, _IOC_SNAP_DESTROY, _VOL_ARGS.pack(0, name), what=what)
            finally:
                os.close(directory)


def nested_subvolumes(subvolume: Path) -> list[bytes]:
    """Return the names of those that were made in one. Raises BtrfsUblkError."""
    return [name for *_, name in _children(subvolume, subvolume_id(subvolume))]


def subvolume_name(target: Path, number: int) -> bytes | None:
    """Return the name that a subvolume of the btrfs at ``target`` has in its directory,
    None when there is no such subvolume. Raises BtrfsUblkError."""
    what = f"cannot look for subvolume {number} of the btrfs at {target}"
    key = (_ROOT_TREE, number, _ROOT_BACKREF_KEY)
    for _, item in _items(target, *key, what=what):
        length: int = _ROOT_REF.unpack_from(item)[2]
        return item[_ROOT_REF.size : _ROOT_REF.size + length]
    return None


def _children(target: Path, subvolume: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield of each subvolume that is in another, but not deeper: the other's id, its
    own, the inode number of its directory, its name."""
    what = f"cannot list the subvolumes in {target}"
    for number, item in _items(target, _ROOT_TREE, subvolume, _ROOT_REF_KEY, what=what):
        inode, _, length = _ROOT_REF.unpack_from(item)
        name = item[_ROOT_REF.size : _ROOT_REF.size + length]
        yield subvolume, number, inode, name


def set_read_only(subvolume: Path, read_only: bool = True) -> None:
    """Make a subvolume read-only, or writable again. Raises BtrfsUblkError."""
    what = f"cannot change {subvolume}"
    answer = _ioctl(subvolume, _IOC_SUBVOL_GETFLAGS, bytes(8), what=what)
    flags = struct.unpack("=Q", answer)[0] & ~_READ_ONLY
    argument = struct.pack("=Q", flags | (_READ_ONLY if read_only else 0))
    _ioctl(subvolume, _IOC_SUBVOL_SETFLAGS, argument, what=what)


def subvolume_id(path: Path) -> int:
    """Return the id of the subvolume that holds ``path``. Raises BtrfsUblkError."""
    asked = _INO_LOOKUP.pack(0, _TOP_INODE)
    what = f"{path} is in no subvolume"
    number: int = _INO_LOOKUP.unpack(_ioctl(path, _IOC_INO_LOOKUP, asked, what=what))[0]
    return number


def is_subvolume(path: Path | int) -> bool:
    """Whether the path, or descriptor, is that of a subvolume's top directory, for what
    is known to lie on a btrfs."""
    try:
        status = os.fstat(path) if isinstance(path, int) else os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_ino == _TOP_INODE


def subvolume_uuids(path: Path) -> tuple[uuid.UUID, uuid.UUID | None]:
    """Return the UUID of the subvolume that holds ``path``, and that of the one it is a
    snapshot of. Raises BtrfsUblkError."""
    _, own, parent = _SUBVOL_INFO.unpack_from(_subvolume_info(path))
    return uuid.UUID(bytes=own), uuid.UUID(bytes=parent) if any(parent) else None


def subvolume_time_s(path: Path) -> int:
    """Return when the subvolume that holds ``path`` was made, or last changed since, in
    seconds since 1970. Raises BtrfsUblkError."""
    changed_s, made_s = _SUBVOL_TIMES.unpack_from(_subvolume_info(path))
    return max(int(changed_s), int(made_s))


def _subvolume_info(path: Path) -> bytes:
    what = f"{path} is in no subvolume"
    return _ioctl(path, _IOC_SUBVOL_INFO, bytes(_SUBVOL_INFO_BYTES), what=what)


def commit_transaction(target: Path) -> None:
    """Wait until all that was done to a file system lies on its disk. Raises
    BtrfsUblkError."""
    _ioctl(target, _IOC_SYNC, b"", what=f"cannot sync the btrfs at {target}")


def check_transactions(target: Path) -> None:
    """Raise BtrfsUblkError if a file system takes no changes any more, after an error
    or FS_IOC_SHUTDOWN (Linux 7.x), which leaves it "rw" in all lists. One that nothing
    was written to stays as it is."""
    what = f"the btrfs at {target} takes no changes any more"
    _ioctl(target, _IOC_START_SYNC, bytes(8), what=what)


def enable_simple_quota(target: Path) -> None:
    """Charge each subvolume of a file system for what is written in it, from now on.
    It takes Linux 6.7. Raises BtrfsUblkError, not if that is so already."""
    what = f"cannot enable simple quotas of the btrfs at {target}"
    _ioctl(target, _IOC_QUOTA_CTL, _QUOTA_CTL.pack(_ENABLE_SIMPLE_QUOTA, 0), what=what)
    # NB: where quotas of the other kind are enabled, the ioctl does nothing.
    mode = Path(f"/sys/fs/btrfs/{filesystem_uuid(target)}/qgroups/mode").read_text()
    if mode.strip() != "squota":
        raise BtrfsUblkError(
            f"{what}: it has quotas of the other kind, which charge snapshots for what "
            "they share",
            hint=f"if you do not need those: btrfs quota disable {target}",
        )


def charged_bytes(target: Path, subvolume: int) -> int:
    """Return what a subvolume is charged for, as of the last transaction; it takes the
    same time for all sizes. Raises BtrfsUblkError, also without quotas."""
    what = f"subvolume {subvolume} of the btrfs at {target} has no quota"
    item = _find_item(target, _QUOTA_TREE, 0, _QGROUP_INFO_KEY, subvolume, what=what)
    number: int = _QGROUP_INFO.unpack_from(item)[1]
    return number


def quota_limit(target: Path, subvolume: int) -> int | None:
    """Return how many bytes a subvolume may be charged for; None: it has no limit.
    Raises BtrfsUblkError without quotas."""
    what = f"subvolume {subvolume} of the btrfs at {target} has no quota"
    key = (_QUOTA_TREE, 0, _QGROUP_LIMIT_KEY, subvolume)
    flags, most = _QGROUP_LIMIT.unpack_from(_find_item(target, *key, what=what))
    return most if flags & _LIMIT_MOST else None


def charges(target: Path) -> dict[int, tuple[int, int | None]]:
    """Return both of all subvolumes, by number. Raises BtrfsUblkError, as both do."""
    what = f"there are no quotas of the btrfs at {target}"
    limits = {}
    for number, item in _items(target, _QUOTA_TREE, 0, _QGROUP_LIMIT_KEY, what=what):
        flags, most = _QGROUP_LIMIT.unpack_from(item)
        limits[number] = most if flags & _LIMIT_MOST else None
    return {
        number: (_QGROUP_INFO.unpack_from(item)[1], limits.get(number))
        for number, item in _items(target, _QUOTA_TREE, 0, _QGROUP_INFO_KEY, what=what)
    }


def quota_limit_if_any(target: Path, subvolume: int) -> int | None:
    """Do the same, and return None also without quotas."""
    with suppress(BtrfsUblkError):
        return quota_limit(target, subvolume)
    return None


def set_default_subvolume(subvolume: Path) -> None:
    """Make mounts that name no subvolume show this one. Raises BtrfsUblkError."""
    number = struct.pack("=Q", subvolume_id(subvolume))
    what = f"cannot make {subvolume} the default subvolume"
    _ioctl(subvolume, _IOC_DEFAULT_SUBVOL, number, what=what)


@contextmanager
def reached_inode(
    target: StrPath, inode: int, *, subvolume: int = TOP_LEVEL
) -> Iterator[Path]:
    """Yield a path to a file of the btrfs mounted at ``target``, valid in the block.

    The file need not be in the subvolume that is mounted there: open_by_handle_at(2)
    opens it by its inode number. The path is /proc/PID/fd/N of the descriptor, which
    other processes of root can use, too. Raises BtrfsUblkError, also when this process
    lacks CAP_DAC_READ_SEARCH.
    """
    target = Path(target)
    what = (
        f"cannot open inode {inode} of subvolume {subvolume} of the btrfs at {target}"
    )
    # NB: a file object is closed by its finaliser, even if a signal comes here.
    with deferred():
        fd = _open_inode(target, inode, subvolume, what=what)
        try:
            file = open(fd, "rb", buffering=0)
        except OSError as error:  # it is a directory
            os.close(fd)
            raise BtrfsUblkError(f"{what}: {error.strerror}") from error
    with file:
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


@contextmanager
def opened_subvolume(target: Path, subvolume: int) -> Iterator[Path]:
    """Yield a path to a subvolume's top directory, whatever of the btrfs is mounted at
    ``target``, as reached_inode() does. It is of this process only."""
    what = f"cannot open subvolume {subvolume} of the btrfs at {target}"
    with deferred():
        fd = _open_inode(target, _TOP_INODE, subvolume, what=what)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _open_inode(target: Path, inode: int, subvolume: int, *, what: str) -> int:
    """Return a descriptor. Raises BtrfsUblkError."""
    fid = _FID.pack(inode, subvolume, _generation(target, inode, subvolume, what=what))
    handle = _HANDLE.pack(len(fid), _FILEID_BTRFS_WITHOUT_PARENT) + fid
    try:
        return _open_by_handle(target, handle)
    except OSError as error:
        hint = "see the kernel log: dmesg | grep -i btrfs"
        if error.errno == errno.EPERM:
            hint = "it takes CAP_DAC_READ_SEARCH: root outside of containers has it"
        raise BtrfsUblkError(f"{what}: {error.strerror}", hint=hint) from error


def _open_by_handle(target: Path, handle: bytes) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd: int = library.open_by_handle_at(
            directory, handle, os.O_RDONLY | os.O_CLOEXEC
        )
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return fd
    finally:
        os.close(directory)


def _generation(target: Path, inode: int, subvolume: int, *, what: str) -> int:
    """Return what tells an inode from earlier ones of the same number."""
    item = _find_item(target, subvolume, inode, _INODE_ITEM_KEY, 0, what=what)
    generation: int = _GENERATION.unpack_from(item)[0]
    return generation


def _find_item(
    target: Path, tree: int, objectid: int, kind: int, offset: int, *, what: str
) -> bytes:
    """Return the item of a key."""
    found = _items(target, tree, objectid, kind, least=offset, most=offset, what=what)
    for _, item in found:
        return item
    raise BtrfsUblkError(f"{what}: there is none")


def _items(
    target: Path,
    tree: int,
    objectid: int,
    kind: int,
    *,
    least: int = 0,
    most: int = _EVERY,
    what: str,
) -> Iterator[tuple[int, bytes]]:
    """Yield the items whose key has an offset from ``least`` to ``most``: that offset,
    and the item."""
    while least <= most:
        search = _SEARCH.pack(
            tree, objectid, objectid, least, most, 0, _EVERY, kind, kind, _MOST_ITEMS
        )
        found = _ioctl(
            target, _IOC_TREE_SEARCH, search.ljust(_SEARCH_BYTES, b"\0"), what=what
        )
        count: int = _SEARCH.unpack_from(found)[-1]
        if not count:
            return
        at = _SEARCH.size
        for _ in range(count):
            _, _, offset, _, length = _FOUND.unpack_from(found, at)
            at += _FOUND.size + length
            yield offset, found[at - length : at]
        least = offset + 1
