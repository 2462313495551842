"""The interface of front ends for the owner of a server: how its address space becomes
a block device. Each kind is one file: ublk.py, fuse.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from btrfs_ublk.base.ledger import Entry, Ledger
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.server.control import Message

if TYPE_CHECKING:
    from btrfs_ublk.server.description import Description

#: In this time, a server notices that its owner died, and usually ends.
_LIFELINE_TIMEOUT_S = 3.0


class FrontEnd(Protocol):
    """The front end of one server, made by front_ends.choose_front_end()."""

    #: The NAME in the server's option ``--front-end NAME``.
    name: ClassVar[str]
    #: The kind of the ledger's entry for the server and what it makes in the kernel.
    kind: ClassVar[str]
    #: The entry for what attach() itself made, to be undone before the server stops.
    attached: Entry | None

    def attach(
        self, ready: Message, description: Description, entry: Entry, ledger: Ledger
    ) -> Path:
        """Return the block device of a server that has sent ``ready`` and is in
        ``entry``.

        Raises ControlError when the event does not have what it should.
        """

    def refuse_if_used(self, device: Path) -> None:
        """Raise LeftoverError, naming the mount, when the server must not stop yet."""

    def remove(self, entry: Entry) -> bool:
        """Remove what a ledger entry of ``kind`` refers to: end the server, and remove
        what it left."""


def end_server(entry: Entry, *, timeout_s: float) -> bool:
    """Wait until the server of a ledger entry, whose owner has died, ends; kill it
    after ``timeout_s``.

    Returns True when it was still there. Raises LeftoverError when it cannot be killed.
    """
    server = entry.details.get("server")
    if server is None:
        return False
    identity = ProcessIdentity(**server)
    was_there = not identity.wait(timeout_s=0.0)
    # NB: after TERM, it does the same as after the death of its owner.
    if not identity.wait(timeout_s=_LIFELINE_TIMEOUT_S) and not identity.stop(
        timeout_s=timeout_s
    ):
        raise LeftoverError(f"server process {identity.pid} hangs in the kernel")
    return was_there
