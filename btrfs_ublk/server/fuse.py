"""The fuse front end: the server exports a file, and we put a loop device on it.

The file is in a FUSE mount that is attached to no directory. It is opened through the
server's /proc/PID/fd, so no other process enters it by accident, and the kernel removes
it with its last user. The loop device disappears when neither we nor a mount use it any
more.

When a server is killed, the next one takes over its connection, if another process has
kept that (fuse_connection.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from btrfs_ublk.base.ledger import Entry, Ledger, remover
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.kernel import loop
from btrfs_ublk.server.control import ControlError, Message
from btrfs_ublk.server.front_end import end_server

if TYPE_CHECKING:
    from btrfs_ublk.server.description import Description

KIND = "fuse-server"

#: The server only has to answer the requests in flight.
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
                # The device is detached when we die, unless it is mounted. Then the
                # server's file is closed, and the server ends as well.
                lifeline=True,
            )
            ledger.amend(self.attached, path=str(path))
        return path

    def refuse_if_used(self, device: Path) -> None:
        """Do nothing: the loop device is gone by now, and another may have its name."""

    def remove(self, entry: Entry) -> bool:
        return _remove(entry)


def served_file(ready: Message) -> Path:
    """Return the file of a server that has sent ``ready``. Raises ControlError when it
    has none."""
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

    ``tag`` and ``lifeline`` are as for loop.attach(). Raises ControlError when the
    file's size is not ``size_bytes``, which is the size in its description.
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
            # Without direct I/O, every block would be cached twice.
            direct_io=True,
            lifeline=lifeline,
        )
    return device.path


@remover(KIND, place=lambda entry: entry.details.get("file"))
def _remove(entry: Entry) -> bool:
    # The server's file and mount end with it. Its loop device has its own entry.
    return end_server(entry, timeout_s=_STOP_TIMEOUT_S)
