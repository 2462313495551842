"""List ublk devices from sysfs, without asking the driver."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from btrfs_ublk.base.records import dataclass

_SECTOR_BYTES = 512
_CHAR_PREFIX = "ublkc"


@dataclass(frozen=True)
class UblkDevice:
    """A device that was added; ``block_path`` is None until it is started."""

    device_id: int
    char_path: Path
    block_path: Path | None
    size_bytes: int | None
    read_only: bool | None


def list_ublk_devices() -> list[UblkDevice]:
    """Return all ublk devices of the machine; [] without the driver."""
    names = [
        path.name.removeprefix(_CHAR_PREFIX)
        for path in Path("/sys/class/ublk-char").glob(f"{_CHAR_PREFIX}*")
    ]
    return [_read(int(name)) for name in sorted(names, key=int)]


def _read(device_id: int) -> UblkDevice:
    block = Path(f"/sys/block/ublkb{device_id}")
    size_bytes = read_only = None
    with suppress(OSError):  # it may go away while we look
        size_bytes = int((block / "size").read_text()) * _SECTOR_BYTES
        read_only = (block / "ro").read_text().strip() == "1"
    return UblkDevice(
        device_id=device_id,
        char_path=Path(f"/dev/{_CHAR_PREFIX}{device_id}"),
        block_path=None if size_bytes is None else Path(f"/dev/{block.name}"),
        size_bytes=size_bytes,
        read_only=read_only,
    )
