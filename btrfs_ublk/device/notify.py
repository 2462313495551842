"""Tell systemd about the state of a service, as sd_notify(3) does: by one datagram."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(*assignments: str) -> None:
    """Send assignments ("READY=1", "STATUS=…") if systemd wants them; never fails."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    with suppress(OSError):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto("\n".join(assignments).encode(), address)
