"""Report on devices. This waits for nothing without a deadline, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.device import control
from btrfs_ublk.device.front_ends import front_end_of
from btrfs_ublk.device.locks import is_locked
from btrfs_ublk.device.state import (
    DeviceDirectory,
    DeviceSpec,
    DeviceState,
    Status,
    device_directories,
    device_directory,
)
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.server.control import ControlError

#: A server that works answers at once.
ANSWER_TIMEOUT_S = 5.0

#: The status that its supervisor noted, if there is one. Without one, "unsupervised"
#: means that its server runs, "dead" that it does not. "hanging": the server does not
#: answer. "damaged": its files are not valid.
Health = Status | Literal["unsupervised", "dead", "hanging", "damaged"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device at one moment.

    ``users`` are texts that say who has it mounted or held. ``reason`` says why it is
    not "serving". ``stats`` are the server's statistics, if they were asked for.
    """

    name: str
    health: Health
    reason: str | None = None
    spec: DeviceSpec | None = None
    state: DeviceState = field(default_factory=DeviceState)
    users: list[str] = field(default_factory=list)
    stats: dict[str, Any] | None = None
    log: Path

    @property
    def path(self) -> Path | None:
        """The block device; None if there never was one."""
        return Path(self.state.device) if self.state.device else None

    @property
    def is_well(self) -> bool:
        return self.health == "serving"

    def to_dict(self) -> dict[str, Any]:
        """Return the device as JSON can hold it."""
        state = asdict(self.state)
        return {
            "name": self.name,
            "health": self.health,
            "reason": self.reason,
            "device": state.pop("device"),
            "front_end": self.spec.front_end if self.spec else None,
            "users": self.users,
            "asked_for": asdict(self.spec) if self.spec else None,
            "state": state,
            "stats": self.stats,
            "log": str(self.log),
        }


def list_devices() -> list[Device]:
    """Return all devices, by name. No server is asked, so none can make this wait."""
    devices = [look_at(directory) for directory in device_directories()]
    # Leave out devices that were removed while we looked.
    return [device for device in devices if device.log.parent.exists()]


def show_device(name: str) -> Device:
    """Return one device, with statistics. Takes up to 5 s if its server hangs.

    Raises UsageError when there is none of that name.
    """
    directory = device_directory(name)
    directory.check()
    return look_at(directory, ask=True)


def look_at(
    directory: DeviceDirectory, *, ask: bool = False, users: bool = True
) -> Device:
    """Return a device; with ``ask``, its server is asked for statistics. Without
    ``users``, they are looked for only where its health hangs on them: the list of
    mounts may be long."""
    try:
        directory.check()
        spec, state = directory.spec(), directory.state()
    except BtrfsUblkError as error:
        return Device(
            name=directory.name, health="damaged", reason=str(error), log=directory.log
        )
    find_users = cache(partial(users_of, spec, state))
    health, reason = _health(directory, spec, state, find_users)
    stats = None
    if ask and is_alive(state.server):
        try:
            stats = control.ask(directory.path, "stats", timeout_s=ANSWER_TIMEOUT_S)
        except control.Silent as error:
            if is_alive(state.server) and health in ("serving", "unsupervised"):
                health, reason = "hanging", str(error)
        except ControlError as error:
            reason = reason or f"its server does not give its statistics: {error}"
    return Device(
        name=directory.name,
        health=health,
        reason=reason,
        spec=spec,
        state=state,
        users=find_users() if users else [],
        stats=stats,
        log=directory.log,
    )


def is_alive(identity: ProcessIdentity | None) -> bool:
    return identity is not None and identity.is_alive()


def users_of(spec: DeviceSpec, state: DeviceState) -> list[str]:
    """Return texts on who uses the device, as far as this mount namespace shows."""
    device = Path(state.device) if state.device else None
    if not is_alive(state.server):
        # Its number may be another device's by now.
        device = front_end_of(spec, state).find()
    if device is None:
        return []
    with suppress(BtrfsUblkError, OSError):  # it may go while we look
        return blockdev.users(device)
    return []


def _health(
    directory: DeviceDirectory,
    spec: DeviceSpec,
    state: DeviceState,
    find_users: Callable[[], list[str]],
) -> tuple[Health, str | None]:
    server = is_alive(state.server)
    if is_alive(state.supervisor) and is_locked(directory.lock):
        if state.status == "serving" and not server:
            return "recovering", "its server has just ended"
        return state.status, state.reason
    keeper = state.reviving
    if keeper is not None:
        pid = keeper.process.pid
        what = "its supervisor has" if server else "its supervisor and server have"
        return "recovering", f"{what} ended; keeper {pid} starts another supervisor"
    if server:
        return (
            "unsupervised",
            "it has no supervisor, so its server is not replaced when it dies",
        )
    if state.status in ("failed", "lost"):
        return state.status, state.reason
    if state.status == "new" and is_locked(directory.lock):
        return "starting", None
    if any(is_alive(record.process) for record in state.keepers):
        return (
            "dead",
            f"reads wait until you run: btrfs-ublk device recover {directory.name}",
        )
    if spec.front_end == "fuse" and (users := find_users()):
        return "lost", (
            "supervisor, server and keeper have ended, and its FUSE connection with "
            f"them; it is {'; '.join(users)}: unmount it, which keeps what was written"
        )
    return "dead", state.reason or "neither its supervisor nor its server runs"
