"""Remove devices that are dead and not in use, and directories left half made."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from btrfs_ublk.base.helpers import SERVER
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.lifecycle import remove_locked
from btrfs_ublk.device.locks import holder_of, lock_file, registry_locked
from btrfs_ublk.device.report import is_alive, look_at, users_of
from btrfs_ublk.device.state import (
    DEFAULT_TIMEOUT_S,
    DeviceDirectory,
    device_directories,
    device_directory,
    devices_directory,
    half_made,
    name_of_half,
)
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.users import links_of, pids
from btrfs_ublk.supervision.client import take_lock

_TOKENS_MAX_S = 86400.0


@dataclass(frozen=True)
class Collected:
    """What became of one device; ``reason`` says why it is left."""

    name: str
    result: Literal["removed", "left", "would-remove"]
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


def collect_devices(
    *, dry_run: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Collected]:
    """Remove devices that have neither supervisor nor server and are not in use.

    Supervised devices are not in the result. A device that is dead but mounted, or
    whose server runs on without a supervisor, is left; the reason says what to do.
    ``dry_run`` only says what would be removed.
    """
    found = [
        outcome
        for directory in device_directories()
        if (outcome := _collect(directory, dry_run=dry_run, timeout_s=timeout_s))
    ]
    if not dry_run:
        _remove_old_tokens()
    return found + _without_directory() + collect_half_made(dry_run=dry_run)


def _remove_old_tokens() -> None:
    """Remove tokens of registries that were last renewed more than a day ago. They end
    after some minutes, and their files are as many as logins and repositories."""
    for path in (devices_directory().parent / "tokens").glob("*"):
        with suppress(OSError, BtrfsUblkError):
            if (lock := lock_file(path)) is None:
                continue  # it is being used
            with lock:
                if os.fstat(lock.fileno()).st_mtime < time.time() - _TOKENS_MAX_S:
                    path.unlink()


def _without_directory() -> list[Collected]:
    """Find servers by the locks that they hold in directories that were removed."""
    found = []
    for pid in pids():
        links = [path for _, path in links_of(pid)]
        if not links or not Path(links[0]).name.startswith(SERVER):
            continue
        for link in links[1:]:
            lock = Path(link.removesuffix(" (deleted)"))
            if str(lock) == link or lock.parent.parent != devices_directory():
                continue
            if lock.name == device_directory(lock.parent.name).server_lock.name:
                reason = (
                    f"{lock.parent} was removed, and its server (pid {pid}) lives: "
                    f"unmount what uses the device; kill {pid}; and losetup --detach "
                    "its loop device, if losetup -l shows one of /btrfs-ublk-*"
                )
                found.append(Collected(lock.parent.name, "left", reason))
    return found


def _collect(
    directory: DeviceDirectory, *, dry_run: bool, timeout_s: float
) -> Collected | None:
    name = directory.name
    try:
        with deferred():
            directory.check()
            if directory.state().reviving is not None:
                return None  # A keeper is about to start another supervisor.
            lock = take_lock(directory)
            if lock is None:
                return None
            with lock:
                reason = _why_not(directory)
                if reason is not None:
                    return Collected(name, "left", reason)
                if dry_run:
                    return Collected(name, "would-remove")
                remove_locked(directory, timeout_s=timeout_s)
    except BtrfsUblkError as error:
        return Collected(name, "left", str(error))
    return Collected(name, "removed")


def _why_not(directory: DeviceDirectory) -> str | None:
    spec, state = directory.spec(), directory.state()
    recover = f"btrfs-ublk device recover {directory.name}"
    users = users_of(spec, state)
    if users and look_at(directory).health == "lost":
        return f"it cannot be recovered, and is in use ({'; '.join(users)}): unmount it"
    if users:
        return f"it is in use ({'; '.join(users)}): {recover}, or unmount it"
    if is_alive(state.server) or _has_holder(directory.server_lock):
        return f"its server runs without a supervisor: {recover}, or device down"
    return None


def _has_holder(path: Path) -> bool:
    try:
        return bool(holder_of(path))
    except ProcessLookupError:
        return False


def collect_half_made(*, dry_run: bool = False) -> list[Collected]:
    """Remove half-made directories of killed commands. The kernel has none of them."""
    devices = devices_directory()
    if not any(half_made(devices)):
        return []
    found = []
    # Commands hold this lock while they make or remove one, so nobody works on these.
    with registry_locked(devices), deferred():
        for path in half_made(devices):
            name = name_of_half(path) or path.name
            if dry_run:
                found.append(Collected(name, "would-remove", f"half made: {path}"))
                continue
            shutil.rmtree(path, ignore_errors=True)
            left = path.exists()
            found.append(Collected(name, "left" if left else "removed", str(path)))
    return found
