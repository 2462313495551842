"""New files from ranges of a volume's virtual data, mapped or not."""

from __future__ import annotations

from os import fspath
from pathlib import Path

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.device import device_map
from btrfs_ublk.errors import UsageError
from btrfs_ublk.kernel.reflink import clone_beneath
from btrfs_ublk.volume.files import opened_top, opened_virtual_data
from btrfs_ublk.volume.report import mount_of
from btrfs_ublk.volume.store import LOCK_TIMEOUT_S, volume_directory


def clone_in_volume(
    name: str,
    path: StrPath,
    *,
    offset: int,
    size_bytes: int,
    base: StrPath | None = None,
) -> Path:
    """Clone a range of the virtual data of a volume that is up into a new file, without
    moving data. Returns the file's path.

    ``path`` is relative to the volume's top directory. ``offset`` is a multiple of the
    block size, the size any number of bytes. Waits for another command that works on
    the volume. Raises UsageError when the file exists or the range is not within the
    virtual data, BtrfsUblkError when the kernel refuses.
    """
    volume = volume_directory(name, base)
    volume.check()
    with volume.locked(timeout_s=LOCK_TIMEOUT_S):
        mount = mount_of(volume)
        target = mount / path
        try:
            with (
                opened_top(volume, mount) as top,
                opened_virtual_data(volume, top) as virtual,
            ):
                clone_beneath(
                    virtual,
                    top,
                    fspath(path),
                    source_offset=offset,
                    size_bytes=size_bytes,
                )
        except OSError as error:
            raise UsageError(f"new file {target}: {error.strerror}") from error
    return target


def unmapped_bytes(name: str, *, offset: int, size_bytes: int) -> int:
    """Return how many bytes of a range of the virtual data are not mapped. Raises
    BtrfsUblkError when the volume's server does not answer.
    """
    end = offset + size_bytes
    mapped = device_map(name).list(start=offset, end=end)
    return size_bytes - sum(
        min(one.offset + one.length, end) - max(one.offset, offset) for one in mapped
    )
