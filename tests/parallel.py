"""Prepares workers of pytest-xdist, which run several tests at a time.

Tests that make devices are marked `native` or `ublk`, and run alone. A worker has its
own mount namespace, in which it can only open harmless devices of /dev. So a test that
makes a device, and has no marker, fails there.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from btrfs_ublk.kernel.mountinfo import read_mountinfo

#: Tests with one of these markers need devices, or the whole machine: they run alone.
ALONE = ("native", "ublk", "vm", "quiet")
#: Devices that any program may open.
_HARMLESS = ("null", "zero", "full", "random", "urandom", "tty")
#: This is added to the report of a failed test.
NOTE = (
    "This test ran in a worker of pytest-xdist, which cannot open /dev/fuse, "
    "/dev/loop-control, /dev/ublk-control or any block device, as other tests run at "
    "the same time. If the test needs one of them, mark it `native` (or `ublk`), and "
    "scripts/test runs it alone. `pytest -n 0` shows whether that is the cause."
)

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


def hide_devices() -> None:
    """Hide devices from this process and its children. Only root could make any."""
    if os.geteuid() != 0:
        return
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount(None, Path("/"), _MS_REC | _MS_PRIVATE)
    # NB: a mount that stays here keeps its device busy after others unmount it.
    for mount in reversed(read_mountinfo()):
        if mount.source.startswith(("/dev/loop", "/dev/ublk")):
            _libc.umount2(os.fsencode(mount.target), _MNT_DETACH)
    _mount(Path("/dev"), Path("/dev"), _MS_BIND | _MS_REC)
    for name in _HARMLESS:
        path = Path("/dev", name)
        if path.is_char_device() and not path.is_symlink():
            _mount(path, path, _MS_BIND)
    if Path("/dev/pts/ptmx").exists():
        # /dev/ptmx itself finds no pseudo-terminals when it is bind-mounted.
        _mount(Path("/dev/pts/ptmx"), Path("/dev/ptmx").resolve(), _MS_BIND)
    _mount(None, Path("/dev"), _MS_REMOUNT | _MS_BIND | _MS_NODEV)


def refuse_alone(item: pytest.Item) -> None:
    """Fail a test that has to run alone."""
    for marker in ALONE:
        if item.get_closest_marker(marker):
            pytest.fail(
                f"this test is marked `{marker}`, so no other may run at the same "
                "time: run it without -n, or with -n 0",
                pytrace=False,
            )


def _mount(source: Path | None, target: Path, flags: int) -> None:
    what = None if source is None else os.fsencode(source)
    done = _libc.mount(what, os.fsencode(target), None, flags, None)
    _check(done, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
