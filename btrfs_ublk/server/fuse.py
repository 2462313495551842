"""The fuse front end: the server exports a file, and we put a loop device on it.

The file is in a FUSE mount that is attached to no directory: it is opened through the
server's /proc/PID/fd, nobody stumbles over it, and the kernel removes it with its last
user. The loop device goes by itself too when neither we nor a mount hold it any more.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from btrfs_ublk.interrupts import deferred
from btrfs_ublk.ledger import Entry, Ledger, remover
from btrfs_ublk.resources import loop
from btrfs_ublk.server.control import ControlError, Message
from btrfs_ublk.server.description import Description
from btrfs_ublk.server.front_end import end_server

KIND = "fuse-server"

#: It has only to answer what is in flight.
_STOP_TIMEOUT_S = 10.0


class FuseFrontEnd:
    name: ClassVar[str] = "fuse"
    kind: ClassVar[str] = KIND

    def __init__(self) -> None:
        self.attached: Entry | None = None

    def attach(
        self, ready: Message, description: Description, entry: Entry, ledger: Ledger
    ) -> Path:
        file = ready.get("file")
        if not isinstance(file, str):
            raise ControlError(f"the server does not name its file: {ready}")
        ledger.amend(entry, file=file)
        read_only = description.read_only
        with loop.open_backing_file(Path(file), read_only=read_only) as backing:
            with deferred():
                details = loop.identity(Path(file), backing)
                self.attached = ledger.enter(loop.KIND, **details)
            # Without direct I/O every block would be cached once more.
            device = loop.attach(
                backing,
                self.attached,
                ledger,
                read_only=read_only,
                direct_io=True,
                # So the device goes when we die, unless it is mounted, and the server
                # sees its file closed, and ends as well.
                lifeline=True,
            )
        return device.path

    def refuse_if_used(self, device: Path) -> None:
        """The loop device is gone by now, and its name may be another's."""

    def remove(self, entry: Entry) -> bool:
        return _remove(entry)


@remover(KIND, place=lambda entry: entry.details.get("file"))
def _remove(entry: Entry) -> bool:
    # Its file and the mount go with it. The loop device on it has an entry of its own.
    return end_server(entry, timeout_s=_STOP_TIMEOUT_S)
