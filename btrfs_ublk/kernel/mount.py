"""Mount and unmount, never lazily: for a busy mount, the error names its users."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import readable, run
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import CommandError, LeftoverError, UsageError
from btrfs_ublk.kernel.mountinfo import MountInfo, read_mountinfo
from btrfs_ublk.kernel.users import pids, pids_using

_KIND = "mount"
#: linux/mount.h
_MS_RDONLY = 1
_UMOUNT_NOFOLLOW = 8

_MOUNT_TIMEOUT_S = 60.0
#: btrfs shows this for a device that was taken away under it (btrfs_show_devname).
_MISSING_SOURCE = "<missing disk>"
#: An unmount writes dirty data back, which may take long.
_UNMOUNT_TIMEOUT_S = 120.0
#: How long processes that keep a mount busy may take to end.
_BUSY_TIMEOUT_S = 2.0
_BUSY_ATTEMPTS = 4


class Mount:
    """A mounted file system; made by ``mounted()``."""

    def __init__(self, ledger: Ledger, entry: Entry) -> None:
        self._ledger = ledger
        self._entry = entry

    @property
    def target(self) -> Path:
        return Path(self._entry.details["target"])

    def info(self) -> MountInfo:
        """Return what the kernel says about it now. Raises LeftoverError if gone."""
        mount = _find(self._entry)
        if mount is None:
            raise LeftoverError(f"{self.target} was unmounted by someone else")
        return mount

    def allow_source(self, device: StrPath) -> None:
        """Note that the file system is about to get this device too: btrfs may show it
        as the mount's source from then on.
        """
        sources = [*self._entry.details["sources"], os.fspath(device)]
        self._ledger.amend(self._entry, sources=sources)

    def remount(
        self, *, options: Sequence[str], timeout_s: float = _MOUNT_TIMEOUT_S
    ) -> None:
        """Change options: ``["rw"]``, say. Raises CommandError."""
        remount(self.target, options=options, timeout_s=timeout_s)


@contextmanager
def mounted(
    source: StrPath,
    target: StrPath,
    *,
    fs_type: str = "btrfs",
    options: Sequence[str] = (),
    read_only: bool = False,
    by_kernel: bool = False,
    shown: tuple[str, str] | None = None,
    timeout_s: float = _MOUNT_TIMEOUT_S,
    ledger: Ledger | None = None,
) -> Iterator[Mount]:
    """Mount on an existing directory; unmount when the block is left. ``by_kernel``
    uses mount(2), because mount(8) would put a loop device on a file. ``shown`` are
    type and source in the list of mounts, if these differ from what is mounted.

    Raises UsageError when the target is no directory or is a mount point already (the
    two mounts could not be told apart), CommandError when mount(8) and OSError when
    mount(2) fails, and at the end LeftoverError when the mount stays busy.
    """
    with deferred():
        # Who only unmounts needs none of this.
        from btrfs_ublk.base.capabilities import MOUNT, ROOT, require
    require(ROOT, MOUNT)
    ledger = ledger or process_ledger()
    source, target = os.fspath(source), Path(os.path.realpath(target))
    if not target.is_dir():
        raise UsageError(f"mount point {target} is not a directory")
    if any(mount.target == target for mount in read_mountinfo()):
        raise UsageError(
            f"{target} is a mount point already", hint="choose an empty directory"
        )
    with ledger.holding(
        _KIND,
        target=str(target),
        sources=[*_source_names(source), *(shown or ())[1:]],
        fs_type=shown[0] if shown else fs_type,
        namespace=mount_namespace(),
    ) as entry:
        if by_kernel:
            mount_now(source, target, fs_type, options=options, read_only=read_only)
        else:
            words = ["ro" if read_only else "rw", *options]
            # mount(8) inherits the lock, so gc waits for it if we are killed now.
            run(
                ["mount", "-t", fs_type, "-o", ",".join(words), source, target],
                timeout_s=timeout_s,
                hint="see the kernel log: dmesg",
                keep_open_fds=[ledger.fileno()],
                env={**os.environ, "LC_ALL": "C"},  # callers look at what it says
            )
        mount = _find(entry)
        if mount is None:
            raise LeftoverError(
                f"the mount at {target} is not the one that was asked for: another "
                "program may have mounted there"
            )
        ledger.amend(entry, mount_id=mount.mount_id, unique_id=unique_mount_id(target))
        yield Mount(ledger, entry)


def remount(
    target: Path, *, options: Sequence[str], timeout_s: float = _MOUNT_TIMEOUT_S
) -> None:
    """Do so for a mount of any program. Raises CommandError."""
    run(
        ["mount", "-o", ",".join(["remount", *options]), target],
        timeout_s=timeout_s,
        hint="see the kernel log: dmesg",
    )


@deferred()
def mount_now(
    source: str,
    target: Path,
    fs_type: str,
    *,
    options: Sequence[str] = (),
    read_only: bool = False,
    flags: int = 0,
) -> None:
    """mount(2), with further ``flags``. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(
        *(os.fsencode(word) for word in (source, target, fs_type)),
        ctypes.c_ulong(flags | (_MS_RDONLY if read_only else 0)),
        os.fsencode(",".join(options)) or None,
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"mount as {fs_type}: {os.strerror(number)}", str(source))


@deferred()
def unmount_now(target: Path) -> None:
    """umount2(2), which follows no symbolic link. Waits a little for what keeps the
    mount busy. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    for attempt in range(1, _BUSY_ATTEMPTS + 1):
        if not library.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW):
            return
        number = ctypes.get_errno()
        if number != errno.EBUSY or attempt == _BUSY_ATTEMPTS:
            raise OSError(number, os.strerror(number), str(target))
        _wait_for_users(target, timeout_s=_BUSY_TIMEOUT_S / _BUSY_ATTEMPTS)


def is_frozen(target: Path) -> bool:
    """Whether the file system mounted there is frozen (fsfreeze(8)), so that unmounting
    it would leave it, and its devices, in use and out of sight. False where the kernel
    does not say (before 5.2).

    A reconfiguration that changes nothing fails with EBUSY then, and only then
    (reconfigure_super() in fs/super.c). Of what can be tried, all else waits.

    NB: fspick() begins with no flags, so that btrfs takes what does not say "ro" for a
    remount to rw (btrfs_reconfigure() in fs/btrfs/super.c).
    """
    at_fdcwd, fspick_cloexec = -100, 1
    fsconfig_set_flag, fsconfig_cmd_reconfigure = 0, 7
    fspick, fsconfig = 433, 431  # glibc has had these calls since 2.36
    here = [mount for mount in read_mountinfo() if mount.target == target]
    if not here:
        return False
    library = ctypes.CDLL(None, use_errno=True)
    fd = library.syscall(fspick, at_fdcwd, os.fsencode(target), fspick_cloexec)
    if fd < 0:
        return False
    try:
        if here[-1].fs_read_only and library.syscall(
            fsconfig, fd, fsconfig_set_flag, b"ro", None, 0
        ):
            return False
        failed = library.syscall(fsconfig, fd, fsconfig_cmd_reconfigure, None, None, 0)
        return bool(failed) and ctypes.get_errno() == errno.EBUSY
    finally:
        os.close(fd)


def _source_names(source: str) -> list[str]:
    """Return the source as given, and the path of the device if it is a link to it."""
    real = os.path.realpath(source) if source.startswith("/") else source
    return sorted({source, real})


def mount_namespace() -> str:
    """Return this mount namespace: "mnt:[4026531840]", say (mount_namespaces(7))."""
    return os.readlink("/proc/self/ns/mnt")


def _holder_of(namespace: str) -> str | None:
    """Return a text on what keeps a mount namespace alive; None if nothing is found.

    NB: another namespace may have its number now: then the entry is kept for longer.
    """
    for pid in pids():
        with suppress(OSError):  # it ended, or we may not look
            if os.readlink(f"/proc/{pid}/ns/mnt") == namespace:
                return f"pid {pid} is in it"
    # unshare --mount=FILE binds it to a file; nsfs shows its number as the root.
    text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    return f"{namespace} is bound to a file" if f" {namespace} " in text else None


def unique_mount_id(target: Path) -> int | None:
    """Return a number that no other mount has until the next boot; None before 6.8.

    It is from statx(2) with STATX_MNT_ID_UNIQUE. The mask in the answer tells whether
    the kernel filled it in. Raises OSError.
    """
    at_fdcwd, statx_mnt_id_unique, mnt_id_offset = -100, 0x4000, 0x90
    answer = ctypes.create_string_buffer(256)
    library = ctypes.CDLL(None, use_errno=True)
    if library.statx(at_fdcwd, os.fsencode(target), 0, statx_mnt_id_unique, answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))
    (mask,) = struct.unpack_from("=I", answer)
    if not mask & statx_mnt_id_unique:
        return None
    unique_id: int = struct.unpack_from("=Q", answer, mnt_id_offset)[0]
    return unique_id


def _find(entry: Entry) -> MountInfo | None:
    """Return the mount that the entry is about, if it is the topmost on its target."""
    details = entry.details
    target = Path(details["target"])
    here = [mount for mount in read_mountinfo() if mount.target == target]
    if not here:
        return None
    mount = here[-1]
    if mount.fs_type != details["fs_type"]:
        return None
    if details.get("unique_id") is not None:
        return mount if unique_mount_id(target) == details["unique_id"] else None
    # NB: without a unique id, a later mount may have the same number. But it cannot
    # have the same device, because that is ours until this mount is gone.
    same_id = details.get("mount_id", mount.mount_id) == mount.mount_id
    sources = [*details["sources"], _MISSING_SOURCE]
    return mount if same_id and mount.source in sources else None


@remover(_KIND)
def _unmount(entry: Entry) -> bool:
    namespace = entry.details.get("namespace", mount_namespace())
    if namespace != mount_namespace():
        # A namespace ends with the last process in it, and its mounts end with it.
        holder = _holder_of(namespace)
        if holder is None:
            return False
        raise LeftoverError(
            f"the mount on {entry.details['target']} is in another mount namespace, "
            f"which is in use: {holder}",
            hint="end the processes in it, or enter it and unmount there: "
            "nsenter --mount=/proc/PID/ns/mnt",
        )
    if _find(entry) is None:
        return False
    target = Path(entry.details["target"])
    for attempt in range(1, _BUSY_ATTEMPTS + 1):
        try:
            run(
                ["umount", target],
                timeout_s=_UNMOUNT_TIMEOUT_S,
                env={**os.environ, "LC_ALL": "C"},
            )
            return True
        except CommandError as error:
            if _find(entry) is None:
                return True  # someone else was quicker
            if "busy" not in error.message:
                raise LeftoverError(f"{target} is still mounted: {error}") from error
            if attempt < _BUSY_ATTEMPTS:
                _wait_for_users(target, timeout_s=_BUSY_TIMEOUT_S / _BUSY_ATTEMPTS)
    found = pids_using(target)
    # This command may have been begun in a directory there, which is of no interest.
    users = "; ".join(x for pid, x in found.items() if pid != os.getpid())
    users = users or "; ".join(found.values())
    raise LeftoverError(
        f"{target} is still mounted and busy: "
        f"{users or 'no process that this one can see uses it'}",
        hint=f"end what uses it, then: btrfs-ublk gc (or: umount {target})",
    )


def _wait_for_users(target: Path, *, timeout_s: float) -> None:
    """Wait until a process that keeps the mount busy has ended, or for a time."""
    deadline_s = time.monotonic() + timeout_s
    pidfds = []
    try:
        for pid in pids_using(target):
            with suppress(OSError):
                pidfds.append(os.pidfd_open(pid))
        readable(pidfds, timeout_s=deadline_s - time.monotonic())
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
