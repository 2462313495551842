"""Events of this host's devices, as they happen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from btrfs_ublk.device.inotify import DirectoryWatch
from btrfs_ublk.device.report import Health, is_alive, look_at
from btrfs_ublk.device.state import (
    DeviceDirectory,
    device_directories,
    devices_directory,
)
from btrfs_ublk.errors import BtrfsUblkError

#: The longest time until an unsupervised process's death is noticed: that changes
#: nothing in the directory.
_RECHECK_S = 1.0

#: "present": the device existed at the start. "health": its health changed.
#: "recovered": a server has replaced a dead one; "upgraded": a living one.
EventName = Literal["present", "added", "health", "recovered", "upgraded", "removed"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """``health`` and ``reason`` are the device's, as from show_device(), when the event
    was seen; None for a removed device. ``recoveries`` and ``upgrades`` count those so
    far. ``time_s`` is seconds since 1970.
    """

    time_s: float
    device: str
    event: EventName
    health: Health | None = None
    reason: str | None = None
    recoveries: int = 0
    upgrades: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Seen:
    """A device at one moment. ``trace`` is equal as long as nothing has changed.
    ``tag`` is None when it cannot be read from the device's files.
    """

    trace: tuple[object, ...]
    tag: str | None
    health: Health
    reason: str | None
    recoveries: int
    upgrades: int


def follow_events() -> Iterator[Event]:
    """Yield events of all devices: first one for each existing device, then new ones.

    If a server is replaced within milliseconds, the device may be "serving" in both
    looks; "recovered" is still reported. Never ends. Raises BtrfsUblkError when the run
    directory is not this user's alone.
    """
    seen: dict[str, _Seen] = {}
    is_first = True
    with DirectoryWatch() as watch:
        while True:
            directories = {each.name: each for each in device_directories()}
            # NB: watched before they are looked at, so that no change is missed.
            watch.add([devices_directory(), *(d.path for d in directories.values())])
            for name in sorted(seen.keys() - directories.keys()):
                del seen[name]
                yield Event(time_s=time.time(), device=name, event="removed")
            for name, directory in directories.items():
                before = seen.get(name)
                now = _look(directory, before)
                if now is None or now == before:
                    continue
                if before is not None and now.tag not in (before.tag, None):
                    before = None  # a new device has its name
                    yield Event(time_s=time.time(), device=name, event="removed")
                seen[name] = now
                for event in _events_between(before, now, is_first=is_first):
                    yield Event(
                        time_s=time.time(),
                        device=name,
                        event=event,
                        health=now.health,
                        reason=now.reason,
                        recoveries=now.recoveries,
                        upgrades=now.upgrades,
                    )
            is_first = False
            watch.wait(_RECHECK_S)


def _look(directory: DeviceDirectory, before: _Seen | None) -> _Seen | None:
    """Look at a device; None when it has been removed meanwhile."""
    trace: tuple[object, ...] = ()
    with suppress(BtrfsUblkError):
        state = directory.state()
        processes = [state.server, state.supervisor]
        processes += [keeper.process for keeper in state.keepers]
        alive = tuple(is_alive(process) for process in processes)
        trace = (state.but(ready={}), alive)
    if before is not None and trace and trace == before.trace:
        return before
    device = look_at(directory)
    if not directory.path.exists():
        return None
    return _Seen(
        trace=trace,
        tag=device.spec.tag if device.spec else None,
        health=device.health,
        reason=device.reason,
        recoveries=device.state.recoveries,
        upgrades=device.state.upgrades,
    )


def _events_between(
    before: _Seen | None, now: _Seen, *, is_first: bool
) -> Iterator[EventName]:
    if before is None:
        yield "present" if is_first else "added"
    else:
        if now.recoveries > before.recoveries:
            yield "recovered"
        if now.upgrades > before.upgrades:
            yield "upgraded"
        if now.health != before.health:
            yield "health"
