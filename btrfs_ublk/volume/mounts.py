"""Where a volume is mounted, according to the kernel."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from btrfs_ublk import kernel as resources
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.btrfs import forget_device
from btrfs_ublk.kernel.mountinfo import (
    MountInfo,
    parse_mountinfo,
    read_mountinfo,
    texts_elsewhere,
)
from btrfs_ublk.kernel.users import command_of, pids_using

if TYPE_CHECKING:
    from btrfs_ublk.volume.store import VolumeDirectory

_BTRFS = Path("/sys/fs/btrfs")
#: All processes have the same file, whatever directories they use, but for containers
#: with a device node of their own.
_CONTROL = "/dev/btrfs-control"
#: To mount takes 0.1 s, and many may wait for each other.
_SEED_TIMEOUT_S, _SEED_RETRY_S = 120.0, 0.01
#: struct flock of linux/fcntl.h: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi")


@contextmanager
def seed_locked(volume: VolumeDirectory) -> Iterator[None]:
    """Let no other volume of the same image be mounted meanwhile. Between the look at a
    mount's devices and their opening, the kernel would take its seed for this one's, as
    it knows seeds by their fsid (btrfs_get_tree_super() in fs/btrfs/super.c). Raises
    BtrfsUblkError."""
    if volume.made().image is None:
        yield
        return
    # A lock of one byte, which stands for that seed, of the open file: with flock(2),
    # all images would wait for each other.
    start = volume.seed().fsid.int >> 66
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    deadline_s = time.monotonic() + _SEED_TIMEOUT_S
    try:
        control = open(_CONTROL, "r+b", buffering=0)
    except OSError as error:
        raise BtrfsUblkError(f"cannot open {_CONTROL}: {error.strerror}") from error
    with control:
        while True:
            try:
                fcntl.fcntl(control, fcntl.F_OFD_SETLK, wanted)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise BtrfsUblkError(
                        f"{_SEED_TIMEOUT_S:g} s were not enough for others to mount the"
                        " same image",
                        hint=f"see which: fuser {_CONTROL}",
                    ) from None
            time.sleep(_SEED_RETRY_S)
        yield


def is_mounted(fsid: UUID) -> bool:
    """Whether it is mounted in any mount namespace."""
    return (_BTRFS / str(fsid)).exists()


def mount_points(fsid: UUID) -> list[Path]:
    """List its mount points in this namespace in the order of mounting, including those
    of its subvolumes and directories (mount --bind), but not of overlays."""
    return [mount.target for mount in mounts_of(fsid, fs_type="btrfs")]


def mounts_of(fsid: UUID, *, fs_type: str | None = None) -> list[MountInfo]:
    """List its mounts in this namespace, in the order of mounting, and those of its
    overlays; all, or those of a type.

    NB: btrfs shows one of its devices as a mount's source.
    """
    names, found = _sources(fsid), read_mountinfo(fs_type=fs_type)
    return [mount for mount in found if mount.source in names]


def overlay_source(fsid: UUID) -> str:
    """Return what mounts of overlays in a volume show as their source, which overlayfs
    itself makes no use of."""
    return f"btrfs-ublk:{fsid}"


def wait_for_users_elsewhere(
    fsid: UUID,
    is_meant: Callable[[MountInfo], bool] = lambda mount: True,
    *,
    timeout_s: float,
) -> list[str]:
    """Wait until users_elsewhere() finds none. Returns [], or the users, for people.

    A process that makes a mount namespace begins with a copy of all mounts. Servers of
    other volumes do as well when they start, for a moment.
    """
    found: list[str] = []

    def are_none() -> bool:
        found[:] = users_elsewhere(fsid, is_meant)
        return not found

    with suppress(TimeoutError):
        resources.wait_until(are_none, timeout_s=timeout_s, what="it is in use")
    return found


def users_elsewhere(
    fsid: UUID, is_meant: Callable[[MountInfo], bool] = lambda mount: True
) -> list[str]:
    """Describe, for people, the mounts in other namespaces that stay when it is
    unmounted here; one process for each namespace. ``is_meant`` chooses from the mounts
    of its file system.

    NB: unmounting below a shared mount also unmounts below all mounts of its peer group
    and their slaves, and nowhere else (mount_namespaces(7)).
    """
    names, texts = _sources(fsid), dict(texts_elsewhere())
    if not any(f" {name} " in text for name in names for text in texts.values()):
        return []  # With many namespaces, parsing all of their mounts takes long.
    elsewhere = {pid: parse_mountinfo(text) for pid, text in texts.items()}
    groups: set[str] = set()
    places = set()
    for mount, parent in _with_parents(read_mountinfo(), names):
        if parent is not None:
            groups |= _groups(parent, "shared")
            places.add(_place(mount, parent))
    found = True
    while found:
        slaves = (
            _groups(mount, "shared")
            for mounts in elsewhere.values()
            for mount in mounts
            if groups & _groups(mount, "master", "propagate_from")
        )
        more = set().union(*slaves)
        found = not more <= groups
        groups |= more
    users = []
    for pid, mounts in elsewhere.items():
        for mount, parent in _with_parents(mounts, names):
            if not is_meant(mount):
                continue
            follows = (
                parent is not None
                and groups & _groups(parent, "shared", "master", "propagate_from")
                and _place(mount, parent) in places
            )
            if not follows:
                users.append(f"pid {pid} ({command_of(pid)}) at {mount.target}")
                break
    return users


def wait_for_openers(fsid: UUID, *, timeout_s: float) -> list[str]:
    """Wait until no other process has the volume's loop devices open. Returns [], or
    the users, for people: the kernel does not detach open ones, unlike ublk devices.

    NB: our own descriptor (attach(), ``lifeline``) is closed when a loop is detached.
    """
    names = device_names(fsid)
    loops = [Path("/dev", name) for name in names if name.startswith("loop")]
    return wait_for_users(*loops, timeout_s=timeout_s)


def wait_for_users(*places: Path, timeout_s: float) -> list[str]:
    """Wait until no other process uses anything at or below these places, which are
    directories or devices. Returns [], or the users, for people."""
    found: list[str] = []

    def are_free() -> bool:
        users = pids_using(*places)
        found[:] = (who for pid, who in users.items() if pid != os.getpid())
        return not found

    with suppress(TimeoutError):
        resources.wait_until(are_free, timeout_s=timeout_s, what="it is in use")
    return found


def device_names(fsid: UUID) -> set[str]:
    """Return the names in /dev of the devices of a mounted file system."""
    try:
        return set(os.listdir(_BTRFS / str(fsid) / "devices"))
    except OSError:
        return set()


def forget(path: Path) -> None:
    """Make btrfs forget an unmounted device. Failing is harmless: btrfs drops the stale
    entry when it learns of another device in its place.
    """
    with suppress(BtrfsUblkError):
        forget_device(path)


def _sources(fsid: UUID) -> set[str]:
    """Return what its mounts may show as their source."""
    return {f"/dev/{name}" for name in device_names(fsid)} | {overlay_source(fsid)}


def _with_parents(
    mounts: list[MountInfo], names: set[str]
) -> Iterator[tuple[MountInfo, MountInfo | None]]:
    """Yield the volume's mounts with their parents; None for a parent out of sight."""
    by_id = {mount.mount_id: mount for mount in mounts}
    for mount in mounts:
        if mount.source in names:
            yield mount, by_id.get(mount.parent_id)


def _groups(mount: MountInfo, *kinds: str) -> set[str]:
    """Return the numbers of a mount's peer groups."""
    words = (word.partition(":") for word in mount.propagation)
    return {number for kind, _, number in words if kind in kinds}


def _place(mount: MountInfo, parent: MountInfo) -> tuple[str, Path]:
    """Return where it is mounted: a file system, and a directory in it."""
    below = os.path.relpath(mount.target, parent.target)
    return parent.device, parent.root / below


def is_read_only(target: Path) -> bool:
    """Whether the mount is read-only, as btrfs makes it after an error."""
    return bool(os.statvfs(target).f_flag & os.ST_RDONLY)
