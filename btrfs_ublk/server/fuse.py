"""The fuse front end: the server exports a file, and we put a loop device on it.

The file is in a FUSE mount that is attached to no directory: it is opened through the
server's /proc/PID/fd, nobody stumbles over it, and the kernel removes it with its last
user. The loop device goes by itself too when neither we nor a mount hold it any more.

When a server is killed, either its connection was kept (fuse_connection.py), and the
next server takes it over, or swap() moves the loop device to the next server's file.
"""

from __future__ import annotations

import os
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
        file = str(served_file(ready))
        ledger.amend(entry, file=file)
        with deferred():
            self.attached = ledger.enter(loop.KIND, backing_file=file)
            path = attach_loop(
                ready,
                self.attached.tag,
                size_bytes=description.size,
                read_only=description.read_only,
                # So the device goes when we die, unless it is mounted, and the server
                # sees its file closed, and ends as well.
                lifeline=True,
            )
            ledger.amend(self.attached, path=str(path))
        return path

    def refuse_if_used(self, device: Path) -> None:
        """The loop device is gone by now, and its name may be another's."""

    def remove(self, entry: Entry) -> bool:
        return _remove(entry)


def served_file(ready: Message) -> Path:
    """What a server that has sent ``ready`` exports. Raises ControlError."""
    file = ready.get("file")
    if not isinstance(file, str):
        raise ControlError(f"the server does not name its file: {ready}")
    return Path(file)


def attach_loop(
    ready: Message,
    tag: str,
    *,
    size_bytes: int,
    read_only: bool,
    lifeline: bool = False,
) -> Path:
    """Put a loop device on the file of a server that has sent ``ready``.

    ``tag`` and ``lifeline`` are those of loop.attach(). Raises ControlError when the
    file has not ``size_bytes``, of its description.
    """
    file = served_file(ready)
    with loop.open_backing_file(file, read_only=read_only) as backing:
        file_bytes = os.fstat(backing.fileno()).st_size
        if file_bytes != size_bytes:
            raise ControlError(
                f"the server's file has {file_bytes} bytes, not {size_bytes}"
            )
        device = loop.attach(
            backing,
            file,
            tag,
            read_only=read_only,
            # Without direct I/O every block would be cached once more.
            direct_io=True,
            lifeline=lifeline,
        )
    return device.path


def swap(device: Path, tag: str, ready: Message) -> None:
    """Move the loop device ``device``, attached as ``tag``, to the file of another
    server of the same description; whoever has it mounted reads on from there (but for
    btrfs that shuts down when a medium changes, as on Linux 7.2: docs/limits.md).

    The server before must have ended, and its connection with it (nobody keeps it), or
    else still serve. Only read-only devices can be moved: UsageError otherwise. An
    owner with a ledger amends the device's ``backing_file``, which is served_file().
    """
    with loop.open_backing_file(served_file(ready), read_only=True) as backing:
        loop.change_backing_file(device, tag, backing)


@remover(KIND, place=lambda entry: entry.details.get("file"))
def _remove(entry: Entry) -> bool:
    # Its file and the mount go with it. The loop device on it has an entry of its own.
    return end_server(entry, timeout_s=_STOP_TIMEOUT_S)
