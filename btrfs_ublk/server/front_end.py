"""What a front end is, for the owner of a server: how its address space gets a block
device. One kind is one file: ublk.py, fuse.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol

from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.ledger import Entry, Ledger
from btrfs_ublk.process import ProcessIdentity
from btrfs_ublk.server.control import Message
from btrfs_ublk.server.description import Description

#: How long a server may take to notice that its owner died, and then usually to end.
_LIFELINE_TIMEOUT_S = 3.0


class FrontEnd(Protocol):
    """One server's; made by front_ends.choose_front_end()."""

    #: As in ``--front-end NAME`` of the server.
    name: ClassVar[str]
    #: Of the ledger's entry for the server and what it makes in the kernel.
    kind: ClassVar[str]
    #: Of what attach() made itself: to be undone before the server is stopped.
    attached: Entry | None

    def attach(
        self, ready: Message, description: Description, entry: Entry, ledger: Ledger
    ) -> Path:
        """The block device of a server that has sent ``ready`` and is in ``entry``.

        Raises ControlError when that does not say what it should.
        """

    def refuse_if_used(self, device: Path) -> None:
        """Raise LeftoverError, naming the mount, when the server must not stop yet."""

    def remove(self, entry: Entry) -> bool:
        """The ledger's remover of ``kind``: end the server, remove what it left."""


def end_server(entry: Entry, *, timeout_s: float) -> bool:
    """Wait for the server of a ledger entry, whose owner died, then end it.

    ``timeout_s`` is what it may take to end in order, before it is killed. True when it
    was still there. Raises LeftoverError when it cannot even be killed.
    """
    server = entry.details.get("server")
    if server is None:
        return False
    identity = ProcessIdentity(**server)
    was_there = identity.is_alive()
    # NB: TERM asks it to do in order what it does for a dead owner anyway.
    if not identity.wait(timeout_s=_LIFELINE_TIMEOUT_S) and not identity.stop(
        timeout_s=timeout_s
    ):
        raise LeftoverError(f"server process {identity.pid} hangs in the kernel")
    return was_there
