"""Make a directory the root of this process, in a mount namespace of its own that has
nothing else but /proc, /sys and a small /dev.

It is no sandbox: its root user is root of the machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
from pathlib import Path

from btrfs_ublk.kernel.mount import mount_now

#: linux/mount.h
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MS_READ_ONLY = 1
_MNT_DETACH = 2
_CLONE_NEWNS = 0x20000
#: glibc has no function for pivot_root(2). Other architectures have the same number.
_SYS_PIVOT_ROOT = {"x86_64": 155}.get(platform.machine(), 41)
#: Character devices of linux/Documentation/admin-guide/devices.txt.
_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
    "ptmx": (5, 2),
}
_LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
_RESOLVER = "/etc/resolv.conf"
_TERMINALS = "/dev/pts"


def enter_root(root: Path) -> None:
    """Do so, for a process that is about to execute a program: there is no way back.
    Directories that are missing in ``root`` are made there. The resolver's settings and
    the terminals are those of the machine. Raises OSError."""
    os.umask(0)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "a mount namespace of its own")
    mount_now("none", Path("/"), "", flags=_MS_REC | _MS_PRIVATE)
    # It is a mount point then, as it must be, also where it is a directory of one.
    mount_now(str(root), root, "", flags=_MS_BIND)
    before = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    shown = {
        path: os.open(path, os.O_PATH)
        for path in (_RESOLVER, _TERMINALS)
        if os.path.exists(path)
    }
    os.chdir(root)
    # The old root is on top of the new one. No path, and no symbolic link of the new
    # one, leads there, and "/" is the new one (pivot_root(2), NOTES).
    _check(libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), f"{root} as the root directory")
    _mount_new("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_READ_ONLY
    _mount_new("sysfs", "/sys", "sysfs", flags)
    _make_devices()
    if _RESOLVER in shown:
        _show_resolver(shown[_RESOLVER])
    if _TERMINALS in shown:
        os.makedirs(_TERMINALS)
        _show(shown[_TERMINALS], _TERMINALS)
    # Mounts of other volumes would otherwise be in use as long as this one is.
    os.fchdir(before)
    _check(libc.umount2(b".", _MNT_DETACH), "the old root directory")
    os.chdir("/")
    os.umask(0o022)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _mount_new(
    source: str, target: str, fs_type: str, flags: int, *options: str
) -> None:
    os.makedirs(target, 0o755, exist_ok=True)
    mount_now(source, Path(target), fs_type, flags=flags, options=options)


def _make_devices() -> None:
    _mount_new("tmpfs", "/dev", "tmpfs", _MS_NOSUID, "mode=0755", "size=1m")
    for name, numbers in _DEVICES.items():
        os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(*numbers))
    for name, rest in _LINKS.items():
        os.symlink(f"/proc/self/fd{rest}", f"/dev/{name}")


def _show_resolver(fd: int) -> None:
    # It is often a link to what something makes when it starts.
    path = os.path.realpath(_RESOLVER)
    if not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        os.mknod(path, stat.S_IFREG | 0o644)
    _show(fd, path)
    flags = _MS_REMOUNT | _MS_BIND | _MS_READ_ONLY
    mount_now("none", Path(path), "", flags=flags)


def _show(fd: int, path: str) -> None:
    """Have what is open in ``fd``, of the old root, at ``path``."""
    mount_now(f"/proc/self/fd/{fd}", Path(path), "", flags=_MS_BIND)
