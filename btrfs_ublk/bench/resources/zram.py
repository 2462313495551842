"""zram devices: compressed RAM disks (Documentation/admin-guide/blockdev/zram.rst)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.base.capabilities import ROOT, Probed, or_vm, require
from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.bench.resources.kernel_module import LoadableModule
from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.kernel import blockdev

_KIND = "zram"
_TIMEOUT_S = 10.0


ZRAM_CONTROL = Path("/sys/class/zram-control")
#: Its driver makes new devices, so existing ones are left alone.
ZRAM = Probed(
    "zram",
    or_vm("use a kernel that has CONFIG_ZRAM"),
    lambda: None if ZRAM_CONTROL.exists() else LoadableModule("zram").probe(),
)


@contextmanager
def zram_device(size_bytes: int, *, ledger: Ledger | None = None) -> Iterator[Path]:
    """Make a device, removed at the end of the block; existing ones are left alone.

    It takes memory as it is written. Raises LeftoverError while it is in use.
    """
    require(ROOT)
    ledger = ledger or process_ledger()
    with ledger.holding(_KIND) as entry:
        with deferred():
            # NB: the read itself makes a device.
            number = int((ZRAM_CONTROL / "hot_add").read_text())
            path = Path(f"/dev/zram{number}")
            ledger.amend(entry, path=str(path), sequence=_disk_sequence(path))
        blockdev.wait_for_node(path, timeout_s=_TIMEOUT_S)
        (_sysfs(path) / "disksize").write_text(str(size_bytes))
        yield path


def _sysfs(path: Path) -> Path:
    return Path("/sys/block") / path.name


def _disk_sequence(path: Path) -> str | None:
    """Return its sequence number, never reused; None before Linux 5.15."""
    try:
        return (_sysfs(path) / "diskseq").read_text().strip()
    except OSError:
        return None


@remover(_KIND, reuses_places=True)
def _remove(entry: Entry) -> bool:
    known = entry.details.get("path")
    if known is None or not _sysfs(Path(known)).exists():
        return False
    path = Path(known)
    if _disk_sequence(path) != entry.details["sequence"]:
        return False
    users = blockdev.wait_until_unused(path, timeout_s=_TIMEOUT_S)
    if users:
        raise LeftoverError(
            f"{path} is in use and was not removed: {'; '.join(users)}",
            hint="unmount it first",
        )
    (_sysfs(path) / "reset").write_text("1")
    (ZRAM_CONTROL / "hot_remove").write_text(path.name.removeprefix("zram"))
    return True
