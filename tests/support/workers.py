"""Prepares workers of pytest-xdist, which run several tests at a time.

Each worker has a mount namespace of its own: what a test mounts there is seen by no
other worker, and leak checks need not look at the whole machine. With --hide-devices,
tests can only open harmless devices of /dev, so one that makes a device, and is neither
in tests/device/ nor marked `device`, fails and says so.
"""

import ctypes
import os
from pathlib import Path

import pytest

from btrfs_ublk.kernel.mountinfo import read_mountinfo

#: Tests with one of these markers need devices, or the whole machine.
NOT_HIDDEN = ("device", "ublk", "vm", "timing")
#: Devices that any program may open.
_HARMLESS = ("null", "zero", "full", "random", "urandom", "tty")
#: This is added to the report of a failed test.
NOTE = (
    "This test ran with --hide-devices: it cannot open /dev/fuse, /dev/loop-control, "
    "/dev/ublk-control or any block device. If it needs one of them, move it to "
    "tests/device/, or mark it `device`. A run without that option shows whether that "
    "is the cause."
)
#: Whether this process is a worker with a mount namespace of its own.
ACTIVE = False
#: Whether devices are hidden from it.
HIDDEN = False

_CLONE_NEWNS = 0x00020000
_MNT_DETACH = 2
_MS_NODEV = 4
_MS_REMOUNT = 32
_MS_BIND = 4096
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def prepare(*, hide_devices: bool) -> None:
    """Give this worker mounts of its own. Only root can, and only it makes devices."""
    global ACTIVE, HIDDEN
    HIDDEN = hide_devices
    if os.geteuid() != 0:
        return
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount(None, Path("/"), _MS_REC | _MS_PRIVATE)
    # NB: a mount that stays here keeps its device busy after others unmount it.
    for mount in reversed(read_mountinfo()):
        if mount.source.startswith(("/dev/loop", "/dev/ublk")):
            _libc.umount2(os.fsencode(mount.target), _MNT_DETACH)
    ACTIVE = True
    if hide_devices:
        _hide_devices()


def refuse(item: pytest.Item) -> None:
    """Fail a test that a worker with hidden devices cannot run."""
    for marker in NOT_HIDDEN:
        if item.get_closest_marker(marker):
            pytest.fail(
                f"this test is marked `{marker}`: run it without --hide-devices",
                pytrace=False,
            )


def _hide_devices() -> None:
    _mount(Path("/dev"), Path("/dev"), _MS_BIND | _MS_REC)
    for name in _HARMLESS:
        path = Path("/dev", name)
        if path.is_char_device() and not path.is_symlink():
            _mount(path, path, _MS_BIND)
    if Path("/dev/pts/ptmx").exists():
        # /dev/ptmx itself finds no pseudo-terminals when it is bind-mounted.
        _mount(Path("/dev/pts/ptmx"), Path("/dev/ptmx").resolve(), _MS_BIND)
    _mount(None, Path("/dev"), _MS_REMOUNT | _MS_BIND | _MS_NODEV)


def _mount(source: Path | None, target: Path, flags: int) -> None:
    what = None if source is None else os.fsencode(source)
    done = _libc.mount(what, os.fsencode(target), None, flags, None)
    _check(done, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
