"""ublk devices that another project's program serves as our child, for comparison."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.capabilities import ROOT, UBLK, require
from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.base.process import (
    Argument,
    Child,
    ProcessIdentity,
    describe_exit,
    launch,
    run,
)
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError
from btrfs_ublk.kernel.waiting import wait_until
from btrfs_ublk.server.devices import DeviceRecord, device_records, refuse_if_used

KIND = "foreign-ublk-device"

_READY_TIMEOUT_S = 30.0
_DELETE_TIMEOUT_S = 40.0
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ForeignDevice:
    path: Path
    pid: int


@contextmanager
def foreign_device(
    argv: Sequence[Argument],
    *,
    delete: Sequence[Argument],
    ledger: Ledger | None = None,
) -> Iterator[ForeignDevice]:
    """Run a program that serves one ublk device and stays in the foreground. At the end
    of the block, remove the device with the command ``delete`` and its number.

    Raises BtrfsUblkError, with the program's last words, when it makes no device;
    LeftoverError while the device is in use.
    """
    require(ROOT, UBLK)
    ledger = ledger or process_ledger()
    child: Child | None = None
    try:
        with ledger.holding(KIND, delete=[os.fspath(word) for word in delete]) as entry:
            with deferred():
                child = launch(argv)
                ledger.amend(entry, server=dataclasses.asdict(child.identity))
            number = _wait_live(child).device_id
            device = f"/dev/ublkb{number}"
            ledger.amend(entry, device=device, number=number, inode=_inode(number))
            yield ForeignDevice(Path(device), child.pid)
    finally:
        if child is not None:
            with deferred():
                child.wait(_END_TIMEOUT_S)
                child.close()


def _wait_live(child: Child) -> DeviceRecord:
    def live() -> DeviceRecord | None:
        if child.returncode is not None:
            what = f"{describe_exit(child.returncode)} before its device was ready"
            raise BtrfsUblkError(child.failure(what))
        record = _record_of(child.pid)
        if record is None or record.state != "live" or not record.block_path.exists():
            return None
        return record

    try:
        return wait_until(live, timeout_s=_READY_TIMEOUT_S, what="no ublk device")
    except TimeoutError as error:
        raise BtrfsUblkError(child.failure(f"gave no device ({error})")) from error


def _record_of(pid: int) -> DeviceRecord | None:
    return next((x for x in device_records() if x.server_pid == pid), None)


def _inode(number: int) -> int | None:
    """Return its inode in sysfs, which is never reused; None without device."""
    try:
        return os.stat(f"/sys/class/ublk-char/ublkc{number}").st_ino
    except FileNotFoundError:
        return None


@remover(KIND, place=lambda entry: entry.details.get("device"), reuses_places=True)
def _remove(entry: Entry) -> bool:
    server = entry.details.get("server")
    if server is None:
        return False
    identity = ProcessIdentity(**server)
    number = _number(entry, identity)
    if number is not None:
        refuse_if_used(Path(f"/dev/ublkb{number}"))
        delete = [*entry.details["delete"], str(number)]
        run(delete, timeout_s=_DELETE_TIMEOUT_S)
    was_alive = not identity.wait(timeout_s=0.0)
    # The server ends once its device is gone.
    if not identity.wait(timeout_s=_END_TIMEOUT_S) and not identity.stop(
        timeout_s=_END_TIMEOUT_S
    ):
        raise LeftoverError(f"server process {identity.pid} hangs in the kernel")
    return number is not None or was_alive


def _number(entry: Entry, server: ProcessIdentity) -> int | None:
    """Return the device's number while the device exists."""
    number: int | None = entry.details.get("number")
    if number is not None:
        return number if _inode(number) == entry.details["inode"] else None
    # NB: the driver forgets a device's process when that ends.
    record = _record_of(server.pid) if server.is_alive() else None
    return record.device_id if record else None
