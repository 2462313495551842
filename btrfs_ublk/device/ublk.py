"""Keep a ublk device when its server dies: the kernel does it, for the next server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.process import RunningServer, run
from btrfs_ublk.device.state import DeviceSpec, DeviceState, FrontEnd
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.kernel.ublk_devices import list_ublk_devices
from btrfs_ublk.server.control import ControlError, Message
from btrfs_ublk.server.devices import (
    COMMAND_TIMEOUT_S,
    STOP_TIMEOUT_S,
    DeviceRecord,
    device_records,
    refuse_if_used,
)

_NODE_TIMEOUT_S = 10.0


class UblkDeviceFrontEnd:
    name: ClassVar[FrontEnd] = "ublk"

    def __init__(self, spec: DeviceSpec, state: DeviceState) -> None:
        self._spec = spec
        known = state.ready.get("id")
        #: The number that the device had before, and is to get again.
        self._id = known if isinstance(known, int) else spec.device_id
        self._attempts = 0

    @property
    def keep_open_fds(self) -> list[int]:
        return []

    def find(self) -> Path | None:
        record = self._record()
        return record.block_path if record else None

    def outlives_servers(self, ready: Message) -> bool:
        return bool(ready.get("recovery", self._spec.recovery) != "none")

    def check_handover(self) -> None:
        """Accept all: the server knows whether the kernel keeps the device."""

    def takeover_options(self) -> list[str] | None:
        self._attempts += 1
        # The server checks the tag itself. Only after a failure do we run a program to
        # read the records, because it may have to be read from this very device.
        if self._attempts == 1 and self._is_there() and self._spec.recovery != "none":
            return self._recover(self._id)
        record = self._record()
        if record is None:
            return None
        if record.state == "unknown":
            raise BtrfsUblkError(
                f"ublk device {record.device_id} does not answer",
                hint="see the kernel log: dmesg | grep -i ublk",
            )
        if record.state == "dead" or self._spec.recovery == "none":
            # It was never started, or no other server can take it over.
            self._delete(record)
            return None
        return self._recover(record.device_id)

    def start_options(self) -> list[str]:
        taken = {device.device_id for device in list_ublk_devices()}
        if self._id is None or (self._id in taken and self._id != self._spec.device_id):
            return self._options()
        return ["--id", str(self._id), *self._options()]

    def attach(self, ready: Message, server: RunningServer) -> Path:
        device = ready.get("device")
        if not isinstance(device, str) or not isinstance(ready.get("id"), int):
            raise ControlError(f"the server does not name its device: {ready}")
        try:
            blockdev.wait_for_node(Path(device), timeout_s=_NODE_TIMEOUT_S)
        except TimeoutError as error:
            raise BtrfsUblkError(str(error)) from error
        self._id, self._attempts = ready["id"], 0
        return Path(device)

    def let_go(self) -> None:
        """Do nothing: only the kernel holds something."""

    @contextmanager
    def going(self, *, safe_stop: bool) -> Iterator[None]:
        device = self.find()
        if device is None or not device.exists():
            yield
            return
        refuse_if_used(device)
        if safe_stop:
            yield
            return
        with blockdev.claimed(device):
            yield

    def remove(self) -> bool:
        record = self._record()
        if record is None:
            return False
        if record.state == "unknown":
            raise LeftoverError(f"ublk device {record.device_id} does not answer")
        refuse_if_used(record.block_path)
        self._delete(record)
        return True

    def _options(self) -> list[str]:
        """Return the options that only count when the device is made."""
        spec = self._spec
        sizes = (("queues", spec.queues), ("depth", spec.depth))
        flags = [f"--feature={name}" for name in spec.features]
        return [*flags, "--recovery", spec.recovery] + [
            word
            for name, value in (*sizes, ("max-io", spec.max_io_bytes))
            if value is not None
            for word in (f"--{name}", str(value))
        ]

    def _recover(self, device_id: int | None) -> list[str]:
        for device in list_ublk_devices():
            has_bytes = device.size_bytes or 0
            if device.device_id == device_id and has_bytes < self._spec.size_bytes:
                return ["--recover", str(device_id), "--grow"]
        return ["--recover", str(device_id)]

    def _is_there(self) -> bool:
        return self._id in {device.device_id for device in list_ublk_devices()}

    def _record(self) -> DeviceRecord | None:
        present = {device.device_id for device in list_ublk_devices()}
        # Ask the driver only if need be, because another device may make it wait.
        if not present:
            return None
        for record in device_records():
            if record.tag == self._spec.tag:
                return record
            if record.state == "unknown" and record.device_id == self._id:
                return record
        return None

    def _delete(self, record: DeviceRecord) -> None:
        run(
            [
                *(helper_path(SERVER), "--delete-device", str(record.device_id)),
                *("--tag", self._spec.tag),
            ],
            # The server sends GET_DEV_INFO first.
            timeout_s=COMMAND_TIMEOUT_S + STOP_TIMEOUT_S,
        )
