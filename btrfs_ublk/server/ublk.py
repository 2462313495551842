"""The ublk front end: the server makes /dev/ublkbN itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from btrfs_ublk.base.ledger import Entry, Ledger
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.server.control import ControlError, Message
from btrfs_ublk.server.devices import KIND, refuse_if_used, remove_device

if TYPE_CHECKING:
    from btrfs_ublk.server.description import Description

_NODE_TIMEOUT_S = 10.0


class UblkFrontEnd:
    name: ClassVar[str] = "ublk"
    kind: ClassVar[str] = KIND

    attached: Entry | None = None

    def attach(
        self, ready: Message, description: Description, entry: Entry, ledger: Ledger
    ) -> Path:
        device = ready.get("device")
        if not isinstance(device, str) or not isinstance(ready.get("id"), int):
            raise ControlError(f"the server does not name its device: {ready}")
        blockdev.wait_for_node(Path(device), timeout_s=_NODE_TIMEOUT_S)
        return Path(device)

    def refuse_if_used(self, device: Path) -> None:
        refuse_if_used(device)

    def remove(self, entry: Entry) -> bool:
        return remove_device(entry)
