"""Wait with the kernel's events until a device appears or is gone.

The kernel multicasts every uevent on the netlink family NETLINK_KOBJECT_UEVENT, group 1
(lib/kobject_uevent.c); udev is not needed. In some network namespaces no event arrives,
so the condition is also checked at intervals. pyroute2 reads uevents too, but its
``get()`` has no deadline, and a wait without one can hang.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from btrfs_ublk.base.process import readable

T = TypeVar("T")

#: Not named in Python's socket module; linux/netlink.h.
_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
#: If an event is missed, we wait no longer than this.
_RECHECK_S = 0.2
_MESSAGE_BYTES = 16384


def parse_uevent(message: bytes) -> dict[str, str]:
    """Return the KEY=value strings behind "action@devpath", each of which ends in NUL.

    The result is empty if the message is not from the kernel (but from udev, say).
    """
    head, *strings = message.split(b"\0")
    if b"@" not in head:
        return {}
    pairs = (text.decode(errors="replace").partition("=") for text in strings if text)
    return {key: value for key, separator, value in pairs if separator}


class UeventMonitor:
    """The stream of uevents since the subscription."""

    def __init__(self, channel: socket.socket | None) -> None:
        self._channel = channel

    def wait(self, *, timeout_s: float, subsystem: str = "block") -> bool:
        """Return whether an event of the subsystem came within ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            channels = [self._channel] if self._channel else []
            if not readable(channels, timeout_s=deadline_s - time.monotonic()):
                return False
            assert self._channel is not None
            try:
                event = parse_uevent(self._channel.recv(_MESSAGE_BYTES))
            except OSError:
                return True  # ENOBUFS: events were lost, perhaps the one we wait for.
            if event.get("SUBSYSTEM") == subsystem:
                return True


@contextmanager
def uevent_monitor() -> Iterator[UeventMonitor]:
    """Subscribe to uevents. If that is refused, the monitor only times out."""
    channel: socket.socket | None = None
    with suppress(OSError):
        channel = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
            _NETLINK_KOBJECT_UEVENT,
        )
    try:
        if channel is not None:
            try:
                channel.bind((0, _KERNEL_GROUP))
            except OSError:
                channel.close()
                channel = None
        yield UeventMonitor(channel)
    finally:
        if channel is not None:
            channel.close()


def wait_until(
    condition: Callable[[], T | None],
    *,
    timeout_s: float,
    what: str,
    subsystem: str = "block",
) -> T:
    """Call ``condition`` after each uevent, and return its first true value.

    It subscribes before the first call, so no event is missed. Raises TimeoutError,
    which names ``what``, after ``timeout_s`` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    with uevent_monitor() as monitor:
        while True:
            value = condition()
            if value:
                return value
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(f"{what}: it did not happen within {timeout_s:g} s")
            monitor.wait(timeout_s=min(remaining_s, _RECHECK_S), subsystem=subsystem)
