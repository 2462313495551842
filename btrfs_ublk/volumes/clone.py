"""Files by hand: ranges of a volume's virtual data, whatever is mapped there."""

from __future__ import annotations

from pathlib import Path

from btrfs_ublk.device import device_map
from btrfs_ublk.errors import UsageError
from btrfs_ublk.resources.reflink import clone_file
from btrfs_ublk.volumes.files import place_in
from btrfs_ublk.volumes.make import LOCK_TIMEOUT_S
from btrfs_ublk.volumes.report import look_at_volume
from btrfs_ublk.volumes.store import volume_directory


def clone_in_volume(
    name: str, path: str, *, offset: int, size_bytes: int, base: Path | None = None
) -> Path:
    """Make a new file of a range of the virtual data of a volume that is up; no data
    moves. Returns where it is.

    ``path`` is relative to the volume's top directory; ``offset`` a multiple of the
    block size, the size any number of bytes. Waits for another command that works on
    the volume. Raises UsageError when the file exists, BtrfsUblkError when the kernel
    refuses.
    """
    volume = volume_directory(name, base)
    volume.check()
    with volume.locked(timeout_s=LOCK_TIMEOUT_S):
        found = look_at_volume(volume, is_ours=True)
        if not found.is_up or found.mount is None:
            why = f" ({found.reason})" if found.reason else ""
            raise UsageError(
                f"volume {name!r} is {found.state}{why}",
                hint=f"btrfs-ublk volume up {name}",
            )
        target = place_in(found.mount, path)
        virtual = found.mount / volume.seed().virtual_data.filename
        clone_file(virtual, target, source_offset=offset, size_bytes=size_bytes)
    return target


def unmapped_bytes(name: str, *, offset: int, size_bytes: int) -> int:
    """How much of a range of the virtual data is not mapped. Raises BtrfsUblkError when
    the volume's server does not say.
    """
    end = offset + size_bytes
    mapped = device_map(name).list(start=offset, end=end)
    return size_bytes - sum(
        min(one.offset + one.length, end) - max(one.offset, offset) for one in mapped
    )
