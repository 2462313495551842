"""Growing the writable size of a volume, while it is up or down."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

from btrfs_ublk.base.jsonfile import sync
from btrfs_ublk.base.log import step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel import loop
from btrfs_ublk.kernel.btrfs import grow_filesystem
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.units import exact_size
from btrfs_ublk.volume.mounts import is_mounted, mount_points
from btrfs_ublk.volume.report import KeptVolume, look_at_volume
from btrfs_ublk.volume.store import (
    LOCK_TIMEOUT_S,
    VolumeDirectory,
    find_own_definition,
    volume_directory,
)


def resize_volume(
    name: str, writable_bytes: int, *, base: StrPath | None = None
) -> KeptVolume:
    """Grow the ``writable`` size of a volume, its room for written data. One that is up
    grows at once, even while it is written to; one that is down, with the next
    up_volume().

    Raises UsageError for a smaller size, when there is no volume of that name, or when
    an administrator's definition sets its size; BtrfsUblkError. If this is killed, the
    next call, or up_volume(), completes it.
    """
    volume = volume_directory(name, base)
    volume.check()
    with volume.locked(timeout_s=LOCK_TIMEOUT_S):
        definition = find_own_definition(name, base=base)
        replace(definition, writable_bytes=writable_bytes)  # it checks the size
        check_writable(volume, writable_bytes)
        grow_writable(volume, writable_bytes)
    return look_at_volume(volume, files=True)


def check_writable(volume: VolumeDirectory, writable_bytes: int) -> None:
    """Raise UsageError when the volume has, or was to get, more than that."""
    before = volume.made().writable_bytes
    try:
        before = max(before, volume.definition(files=False).writable_bytes)
    except UsageError:  # it is not valid; volume.json is
        pass
    if writable_bytes < before:
        raise UsageError(
            f"volume {volume.name!r} has {exact_size(before)} for what is written: "
            f"it cannot shrink to {exact_size(writable_bytes)}",
            hint=f"leave it so (writable = {exact_size(before)!r}), or make another "
            "volume",
        )


def grow_writable(volume: VolumeDirectory, writable_bytes: int) -> None:
    """Grow the image and the file system; the caller holds the lock and has called
    check_writable(). A repeated call completes one that was cut off.

    NB: the order matters. The image may be larger than its file system. The definition
    must say what the file system may already have. volume.json is written last, so that
    an unfinished call is not taken for done.
    """
    image, made = volume.sprout_image, volume.made()
    has_sprouted = made.fsid is not None
    try:
        image_bytes = image.stat().st_size if has_sprouted else 0
    except OSError as error:
        raise BtrfsUblkError(f"{image}: {error.strerror}") from error
    is_whole = made.writable_bytes == writable_bytes
    if is_whole and (not has_sprouted or image_bytes >= writable_bytes):
        return
    what = f"grow volume {volume.name} to {exact_size(writable_bytes)}"
    with deferred(), step(what):
        if has_sprouted and image_bytes < writable_bytes:
            _extend(image, writable_bytes)
        _write_intent(volume, writable_bytes)
        fsid = volume.fsid()
        if fsid is not None and is_mounted(fsid):
            _grow_mounted(volume, mount_points(fsid), writable_bytes)
            volume.write_made(replace(made, writable_bytes=writable_bytes))
        elif not has_sprouted:
            volume.write_made(replace(made, writable_bytes=writable_bytes))


def _extend(image: Path, size_bytes: int) -> None:
    try:
        os.truncate(image, size_bytes)
        sync(image)
    except OSError as error:
        hint = None
        if error.errno == errno.EFBIG:
            hint = "its file system, or ulimit -f, ends files before that: take less"
        raise BtrfsUblkError(
            f"cannot make {image} {exact_size(size_bytes)} large: {error.strerror}",
            hint=hint,
        ) from error


def _write_intent(volume: VolumeDirectory, writable_bytes: int) -> None:
    try:
        kept = volume.definition()
    except UsageError:  # the next "up" gets another one or fails
        return
    volume.write_definition(replace(kept, writable_bytes=writable_bytes))


def _grow_mounted(
    volume: VolumeDirectory, points: list[Path], writable_bytes: int
) -> None:
    if not points:
        raise BtrfsUblkError(
            f"volume {volume.name!r} is mounted in another mount namespace only, where "
            "it cannot be grown from",
            hint=f"go there, or: btrfs-ublk volume down {volume.name}",
        )
    for device, image in loops_below(volume.path):
        if image == volume.sprout_image:
            loop.grow(device, None, image)
            grow_filesystem(points[0], device, writable_bytes)
            return
    raise BtrfsUblkError(f"no loop device stands on {volume.sprout_image}")
