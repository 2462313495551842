"""List the ublk devices that the driver has, and remove those that were left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.ledger import Entry, remover
from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import run
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.kernel.ublk_devices import list_ublk_devices
from btrfs_ublk.server.front_end import end_server

KIND = "ublk-device"

#: The server bounds each of its own control commands to this (ublk_control.c).
COMMAND_TIMEOUT_S = 30.0
_MARGIN_S = 10.0
#: The time to take a device down (STOP_DEV, DEL_DEV), or for a server to do that.
STOP_TIMEOUT_S = 2 * COMMAND_TIMEOUT_S + _MARGIN_S
#: The time for an unmount that is in progress to end.
_UNUSED_TIMEOUT_S = 10.0
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class DeviceRecord:
    """The driver's record of a device; ``tag`` has 16 hex digits (ublksrv_flags).

    A device that does not answer has the state "unknown", and neither pid nor tag.
    """

    device_id: int
    state: str
    server_pid: int | None
    tag: str | None

    @property
    def block_path(self) -> Path:
        return Path(f"/dev/ublkb{self.device_id}")


def device_records() -> list[DeviceRecord]:
    """List all ublk devices of the machine. Raises CommandError, CapabilityError."""
    count = len(list_ublk_devices())
    if not count:
        return []
    output = run(
        [helper_path(SERVER), "--list-devices"],
        # In the worst case, no device answers.
        timeout_s=count * COMMAND_TIMEOUT_S + _MARGIN_S,
    )
    return parse_records(output.stdout)


def parse_records(text: str) -> list[DeviceRecord]:
    """Parse the output of ``--list-devices``. Lines that are not valid are skipped:
    they may be about other devices, and must not prevent the removal of ours."""
    records = []
    for line in text.splitlines():
        try:
            keys = json.loads(line)
            records.append(
                DeviceRecord(
                    int(keys["id"]),
                    str(keys["state"]),
                    keys.get("server_pid"),
                    keys.get("tag"),
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("%s: no record of a ublk device: %.200r", SERVER, line)
    return records


def refuse_if_used(path: Path) -> None:
    """Raise LeftoverError, naming the mount, while the device is mounted or held."""
    users = path.is_block_device() and blockdev.wait_until_unused(
        path, timeout_s=_UNUSED_TIMEOUT_S
    )
    if users:
        raise LeftoverError(
            f"{path} is in use and was not removed: {'; '.join(users)}",
            hint="unmount it first",
        )


@remover(KIND, place=lambda entry: entry.details.get("device"), reuses_places=True)
def remove_device(entry: Entry) -> bool:
    """Remove the device that has the entry's tag, and its server with it.

    A server whose owner died stops by itself; it is ended if that takes too long.
    """
    for record in _records_of(entry):
        refuse_if_used(record.block_path)
    was_there = end_server(entry, timeout_s=STOP_TIMEOUT_S)
    for record in _records_of(entry):
        refuse_if_used(record.block_path)
        device_id = str(record.device_id)
        run(
            [helper_path(SERVER), "--delete-device", device_id, "--tag", entry.tag],
            # The server sends GET_DEV_INFO first.
            timeout_s=COMMAND_TIMEOUT_S + STOP_TIMEOUT_S,
        )
        was_there = True
    return was_there


def _records_of(entry: Entry) -> list[DeviceRecord]:
    """Return the device that carries the entry's tag, as a list of one or none.

    Raises LeftoverError when a device that does not answer is the entry's, or may be.
    """
    known = _number(entry.details.get("device"))
    present = {device.device_id for device in list_ublk_devices()}
    # Ask the driver only if need be, because another device may make it wait.
    if not present or (known is not None and known not in present):
        return []
    records = device_records()
    for record in records:
        if record.state == _UNKNOWN and known in (None, record.device_id):
            raise LeftoverError(
                f"ublk device {record.device_id} does not answer: it is not known "
                "whose it is",
                hint="see the kernel log: dmesg | grep -i ublk; end its server",
            )
    return [record for record in records if record.tag == entry.tag]


def _number(path: str | None) -> int | None:
    """Return N of /dev/ublkbN."""
    match = re.fullmatch(r"/dev/ublkb([0-9]+)", path or "")
    return int(match.group(1)) if match else None
