"""ublk devices in the driver's own records, and the removal of those left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.helpers import SERVER, helper_path
from btrfs_ublk.ledger import Entry, remover
from btrfs_ublk.process import ProcessIdentity, run
from btrfs_ublk.resources import blockdev
from btrfs_ublk.resources.ublk_devices import list_ublk_devices

KIND = "ublk-device"

#: The server bounds each of its own control commands to 30 s.
_ADMIN_TIMEOUT_S = 60.0
#: For an unmount that is still under way.
_UNUSED_TIMEOUT_S = 10.0
#: How long a server whose owner died may take to notice and to end.
_LIFELINE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class DeviceRecord:
    """What the driver knows of a device; ``tag`` is 16 hex digits (ublksrv_flags)."""

    device_id: int
    state: str
    server_pid: int
    tag: str

    @property
    def block_path(self) -> Path:
        return Path(f"/dev/ublkb{self.device_id}")


def device_records() -> list[DeviceRecord]:
    """Every ublk device of the machine. Raises CommandError, CapabilityError."""
    if not list_ublk_devices():
        return []
    output = run([helper_path(SERVER), "--list-devices"], timeout_s=_ADMIN_TIMEOUT_S)
    lines = [json.loads(line) for line in output.stdout.splitlines()]
    return [
        DeviceRecord(line["id"], line["state"], line["server_pid"], line["tag"])
        for line in lines
    ]


def refuse_if_used(path: Path) -> None:
    """Raise LeftoverError, naming the mount, while the device is mounted or held."""
    users = path.exists() and blockdev.wait_until_unused(
        path, timeout_s=_UNUSED_TIMEOUT_S
    )
    if users:
        raise LeftoverError(
            f"{path} is in use and was not removed: {'; '.join(users)}",
            hint="unmount it first",
        )


@remover(KIND, place=lambda entry: entry.details.get("device"))
def remove_device(entry: Entry) -> bool:
    """Remove the device that carries the entry's tag, and its server with it.

    A server whose owner died stops by itself; it is waited for, then ended.
    """
    refuse_if_used_by_tag(entry.tag)
    was_there = False
    server = entry.details.get("server")
    if server is not None:
        identity = ProcessIdentity(**server)
        was_there = identity.is_alive()
        if not identity.wait(timeout_s=_LIFELINE_TIMEOUT_S) and not identity.stop(
            timeout_s=_LIFELINE_TIMEOUT_S
        ):
            raise LeftoverError(f"server process {identity.pid} hangs in the kernel")
    for record in _records_with_tag(entry.tag):
        refuse_if_used(record.block_path)
        device_id = str(record.device_id)
        run(
            [helper_path(SERVER), "--delete-device", device_id, "--tag", entry.tag],
            timeout_s=_ADMIN_TIMEOUT_S,
        )
        was_there = True
    return was_there


def refuse_if_used_by_tag(tag: str) -> None:
    """As refuse_if_used(), for whatever device carries the tag."""
    for record in _records_with_tag(tag):
        refuse_if_used(record.block_path)


def _records_with_tag(tag: str) -> list[DeviceRecord]:
    return [record for record in device_records() if record.tag == tag]
