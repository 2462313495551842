"""Mount and unmount, never lazily: for a busy mount, the error names its users."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import call_bounded, readable
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import CommandError, LeftoverError, UsageError
from btrfs_ublk.kernel.mountinfo import MountInfo, mounts_at
from btrfs_ublk.kernel.users import pids, pids_using

_KIND = "mount"
#: linux/mount.h
_MS_RDONLY = 1
_UMOUNT_NOFOLLOW = 8
_SET_FLAG, _SET_STRING, _CREATE, _RECONFIGURE = 0, 1, 6, 7
_READ_ONLY = 1
#: Options of a mount: the bits that each decides (MOUNT_ATTR_*), and their values. All
#: others are its file system's, and so are these two.
_BOTH = ("ro", "rw")
_ATTRIBUTES = {
    "defaults": (0, 0),
    **{"ro": (_READ_ONLY, _READ_ONLY), "rw": (_READ_ONLY, 0)},
    **{"nosuid": (2, 2), "suid": (2, 0), "nodev": (4, 4), "dev": (4, 0)},
    **{"noexec": (8, 8), "exec": (8, 0)},
    **{"noatime": (0x70, 0x10), "strictatime": (0x70, 0x20)},
    **{"relatime": (0x70, 0), "atime": (0x70, 0)},
    **{"nodiratime": (0x80, 0x80), "diratime": (0x80, 0)},
}
#: FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC, FSPICK_CLOEXEC
_CLOEXEC = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_AT_FDCWD = -100
#: Numbers of system calls, the same on all machines; glibc has these since 2.36.
_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK = 429, 430, 431, 432, 433
_MOUNT_SETATTR = 442

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
    shown: tuple[str, str] | None = None,
    prepare: Callable[[Path], object] | None = None,
    added: Sequence[StrPath] = (),
    timeout_s: float = _MOUNT_TIMEOUT_S,
    ledger: Ledger | None = None,
) -> Iterator[Mount]:
    """Mount on an existing directory; unmount when the block is left. ``prepare`` is
    called before anybody sees the mount, with a path to it, valid for all processes of
    root; if it adds devices, these are ``added``: btrfs may show one as the source.
    ``shown`` are type and source in the list of mounts, if these differ from what is
    mounted.

    Raises UsageError when the target is no directory or is a mount point already (the
    two mounts could not be told apart), CommandError when it cannot be mounted, what
    ``prepare`` raises, and at the end LeftoverError when the mount stays busy.
    """
    with deferred():
        # Who only unmounts needs none of this.
        from btrfs_ublk.base.capabilities import ROOT, require
    require(ROOT)
    ledger = ledger or process_ledger()
    source, target = os.fspath(source), Path(os.path.realpath(target))
    if not target.is_dir():
        raise UsageError(f"mount point {target} is not a directory")
    if mounts_at(target):
        raise UsageError(
            f"{target} is a mount point already", hint="choose an empty directory"
        )
    with ledger.holding(
        _KIND,
        target=str(target),
        sources=[
            *_source_names(source),
            *(os.fspath(x) for x in added),
            *(shown or ())[1:],
        ],
        fs_type=shown[0] if shown else fs_type,
        namespace=mount_namespace(),
    ) as entry:
        words = [*options, *(["ro"] if read_only else [])]
        with _detached(source, fs_type, words, timeout_s=timeout_s) as fd:
            if prepare is not None:
                prepare(Path(f"/proc/{os.getpid()}/fd/{fd}"))
            with _explained(f"cannot mount {source} on {target}"):
                flags = _MOVE_MOUNT_F_EMPTY_PATH
                _call(_MOVE_MOUNT, fd, b"", _AT_FDCWD, os.fsencode(target), flags)
        mount = _find(entry)
        if mount is None:
            raise LeftoverError(
                f"the mount at {target} is not the one that was asked for: another "
                "program may have mounted there"
            )
        ledger.amend(entry, mount_id=mount.mount_id, unique_id=unique_mount_id(target))
        yield Mount(ledger, entry)


@contextmanager
def _detached(
    source: str, fs_type: str, options: Sequence[str], *, timeout_s: float
) -> Iterator[int]:
    """Mount nowhere. Yields a descriptor of the mount, which ends with the block unless
    it was moved to a directory. Raises CommandError."""
    fd = -1
    try:
        with deferred(), _explained(f"cannot mount {source} as {fs_type}"):
            try:
                fd = _made(source, fs_type, options, timeout_s=timeout_s)
            except OSError as error:
                # As mount(8) does: until Linux 6.12, a seed's device, which cannot be
                # written to, refuses its sprout for writing at first.
                if error.errno not in (errno.EACCES, errno.EROFS) or "ro" in options:
                    raise
                only_read = [*options, "ro"]
                fd = _made(source, fs_type, only_read, timeout_s=timeout_s)
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def _made(
    source: str, fs_type: str, options: Sequence[str], *, timeout_s: float
) -> int:
    """Return a descriptor of a new mount. Raises OSError."""
    attributes = 0
    for word in options:  # the last one of several counts
        bits, value = _ATTRIBUTES.get(word, (0, 0))
        attributes = attributes & ~bits | value
    own = [x for x in options if x in _BOTH or x not in _ATTRIBUTES]
    context = _call(_FSOPEN, fs_type.encode(), _CLOEXEC)
    try:
        _configure(context, [f"source={source}", *own], _CREATE, timeout_s=timeout_s)
        return _call(_FSMOUNT, context, _CLOEXEC, attributes)
    finally:
        os.close(context)


def _configure(
    context: int, options: Iterable[str], command: int, *, timeout_s: float
) -> None:
    """Set the options of a file system that ``command`` mounts or changes, and do so.
    Raises OSError, whose notes are the kernel's words."""
    try:
        for word in options:
            key, is_pair, value = word.partition("=")
            kind = _SET_STRING if is_pair else _SET_FLAG
            text = os.fsencode(value) if is_pair else None
            _call(_FSCONFIG, context, kind, os.fsencode(key), text, 0)
        call_bounded(
            lambda: _call(_FSCONFIG, context, command, None, None, 0),
            timeout_s=timeout_s,
        )
    except TimeoutError:
        raise  # NB: the call that hangs keeps others from reading what it says.
    except OSError as error:
        with suppress(OSError):
            while said := os.read(context, 4096):
                error.add_note(said.decode(errors="replace").strip())
        raise


def _call(number: int, *arguments: object) -> int:
    """Make a system call that the C library may not have. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.syscall(number, *arguments)
    if result < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    return result


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Make errors of the kernel say what failed. Raises CommandError."""
    try:
        yield
    except OSError as error:
        said = "".join(f"\n  {line}" for line in getattr(error, "__notes__", ()))
        raise CommandError(
            f"{what}: {error.strerror or error}{said}", hint="see the kernel log: dmesg"
        ) from error


@deferred()
def remount(
    target: Path, *, options: Sequence[str], timeout_s: float = _MOUNT_TIMEOUT_S
) -> None:
    """Change options of any mount, and of its file system, as ``["rw"]``. Raises
    CommandError."""
    with _explained(f"cannot remount {target} ({','.join(options)})"):
        if {"ro", "rw"}.intersection(options):
            pair = (_READ_ONLY, 0) if "ro" in options else (0, _READ_ONLY)
            change = struct.pack("=QQQQ", *pair, 0, 0)  # struct mount_attr
            path = os.fsencode(target)
            _call(_MOUNT_SETATTR, _AT_FDCWD, path, 0, change, len(change))
        context = _call(_FSPICK, _AT_FDCWD, os.fsencode(target), _CLOEXEC)
        try:
            _configure(context, options, _RECONFIGURE, timeout_s=timeout_s)
        finally:
            os.close(context)


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

    def unmount() -> int:
        failed = library.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW)
        return ctypes.get_errno() if failed else 0

    for attempt in range(1, _BUSY_ATTEMPTS + 1):
        number = call_bounded(unmount, timeout_s=_UNMOUNT_TIMEOUT_S)
        if not number:
            return
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
    here = mounts_at(target)
    if not here:
        return False
    try:
        fd = _call(_FSPICK, _AT_FDCWD, os.fsencode(target), _CLOEXEC)
    except OSError:
        return False
    try:
        if here[-1].fs_read_only:
            _call(_FSCONFIG, fd, _SET_FLAG, b"ro", None, 0)
        _call(_FSCONFIG, fd, _RECONFIGURE, None, None, 0)
        return False
    except OSError as error:
        return error.errno == errno.EBUSY
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
    here = mounts_at(target)
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
    try:
        unmount_now(target)
        return True
    except OSError as error:
        if _find(entry) is None:
            return True  # someone else was quicker
        if error.errno != errno.EBUSY:
            raise LeftoverError(
                f"{target} is still mounted: {error.strerror or error}"
            ) from error
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
