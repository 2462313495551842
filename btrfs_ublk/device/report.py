"""What there is, for people and programs: asked with deadlines, and nothing changed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

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
from btrfs_ublk.process import ProcessIdentity
from btrfs_ublk.resources import blockdev
from btrfs_ublk.server.control import ControlError

#: A server that is well answers at once.
ANSWER_TIMEOUT_S = 5.0

#: Its supervisor's word where there is one; else "unsupervised": its server serves on;
#: "dead": it has neither. "hanging": the server does not answer. "damaged": its files
#: make no sense.
Health = Status | Literal["unsupervised", "dead", "hanging", "damaged"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device at one moment.

    ``users`` tell who has it mounted or held, for people. ``reason`` says why it is not
    "serving". ``stats`` are the server's, where they were asked for.
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
        """The block device; None as long as there was none."""
        return Path(self.state.device) if self.state.device else None

    @property
    def is_well(self) -> bool:
        return self.health == "serving"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """All devices, by name. Servers are not asked, so none can make this wait."""
    devices = [look_at(directory) for directory in device_directories()]
    # One may be removed while we look.
    return [device for device in devices if device.log.parent.exists()]


def show_device(name: str) -> Device:
    """One device, with its server's statistics. Takes up to 5 s when that hangs.

    Raises UsageError when there is none of that name.
    """
    directory = device_directory(name)
    directory.check()
    return look_at(directory, ask=True)


def look_at(directory: DeviceDirectory, *, ask: bool = False) -> Device:
    """``ask``: the server, for its statistics."""
    try:
        directory.check()
        spec, state = directory.spec(), directory.state()
    except BtrfsUblkError as error:
        return Device(
            name=directory.name, health="damaged", reason=str(error), log=directory.log
        )
    health, reason = _health(directory, state)
    stats = None
    if ask and is_alive(state.server):
        try:
            stats = control.ask(directory.path, "stats", timeout_s=ANSWER_TIMEOUT_S)
        except control.Silent as error:
            if is_alive(state.server) and health in ("serving", "unsupervised"):
                health, reason = "hanging", str(error)
        except ControlError as error:
            reason = reason or f"no statistics: {error}"
    return Device(
        name=directory.name,
        health=health,
        reason=reason,
        spec=spec,
        state=state,
        users=users_of(spec, state),
        stats=stats,
        log=directory.log,
    )


def is_alive(identity: ProcessIdentity | None) -> bool:
    return identity is not None and identity.is_alive()


def users_of(spec: DeviceSpec, state: DeviceState) -> list[str]:
    """Who has the device, for people; as far as this mount namespace shows."""
    device = Path(state.device) if state.device else None
    if not is_alive(state.server):
        # Its number may be another's by now.
        device = front_end_of(spec, state).find()
    if device is None:
        return []
    with suppress(BtrfsUblkError, OSError):  # it may go while we look
        return blockdev.users(device)
    return []


def _health(
    directory: DeviceDirectory, state: DeviceState
) -> tuple[Health, str | None]:
    server = is_alive(state.server)
    if is_alive(state.supervisor) and is_locked(directory.lock):
        if state.status == "serving" and not server:
            return "recovering", "its server has just ended"
        return state.status, state.reason
    if server:
        return "unsupervised", "no supervisor: if its server dies, nobody replaces it"
    if state.status in ("failed", "lost"):
        return state.status, state.reason
    if state.status == "new" and is_locked(directory.lock):
        return "starting", None
    return "dead", state.reason or "neither supervisor nor server run"
