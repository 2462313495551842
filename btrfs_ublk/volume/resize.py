"""More room for what is written to a volume; and detaching the volume of an image, for
which btrfs copies all data there (docs/how-to/detaching.md)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from btrfs_ublk.base.jsonfile import sync
from btrfs_ublk.base.log import step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import spawn
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel import loop
from btrfs_ublk.kernel.btrfs import devices_of, grow_filesystem
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.units import MIB, exact_size
from btrfs_ublk.volume.image import up_with_image
from btrfs_ublk.volume.mounts import is_mounted, mount_points
from btrfs_ublk.volume.report import KeptVolume, look_at_volume
from btrfs_ublk.volume.store import (
    VolumeDirectory,
    find_own_definition,
    locked_volume,
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
    with locked_volume(name, base) as volume:
        definition = find_own_definition(name, base=base)
        replace(definition, writable_bytes=writable_bytes)  # it checks the size
        check_writable(volume, writable_bytes)
        grow_writable(volume, writable_bytes)
    return look_at_volume(volume, most_files=None)


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
    raise BtrfsUblkError(f"no loop device is on {volume.sprout_image}")


#: How often the size of what was copied is looked at.
_WATCH_S = 0.5
#: For metadata, and for what others write meanwhile.
_MARGIN_BYTES = 64 << 20


@dataclass(frozen=True)
class Detached:
    """What detach_image() did. ``copied_bytes`` is 0 when that was done before."""

    mount: Path
    copied_bytes: int


def detach_image(
    name: str,
    *,
    base: StrPath | None = None,
    expect: Callable[[int], object] = lambda total: None,
    progress: Callable[[int], object] = lambda count: None,
) -> Detached:
    """Copy all data of an image to its volume, which is up and stays in use. The image,
    and the registry that it came from, may go then.

    If it fails, or is stopped, nothing has changed but that a part is copied, and the
    next call goes on. ``expect`` gets the bytes of all data, ``progress`` what was
    copied since its last call. Raises UsageError for a volume with too little room, and
    BtrfsUblkError.
    """
    with up_with_image(name, base) as up:
        writable = up.writable
    devices = devices_of(up.mount)
    if up.device not in devices:
        _fetch_nothing_first(name, base)
        return Detached(up.mount, 0)
    room_bytes = sum(
        total - used for path, (_, used, total) in devices.items() if path != up.device
    )
    missing_bytes = up.data_bytes + _MARGIN_BYTES - room_bytes
    if missing_bytes > 0:
        enough_bytes = -(-(writable.stat().st_size + missing_bytes) // MIB) * MIB
        raise UsageError(
            f"volume {name!r} has no room for {exact_size(up.data_bytes)} of data",
            hint="it takes more for what is written: btrfs-ublk volume resize "
            f"{name} {exact_size(enough_bytes)}",
        )
    expect(up.data_bytes)
    before = done = _stored_bytes(writable)
    # NB: the kernel stops when this process is stopped, and then nothing has changed.
    with spawn(["btrfs", "device", "remove", up.device, up.mount]) as child:
        while child.wait(_WATCH_S) is None:
            now = max(done, _stored_bytes(writable))
            progress(now - done)
            done = now
        if child.returncode != 0:
            raise BtrfsUblkError(
                f"volume {name!r} is not detached: "
                f"{child.stderr_tail().strip() or child.returncode}",
                hint="what was copied stays; try again when the cause is gone. See "
                "the kernel log: dmesg | grep -i btrfs",
            )
    _fetch_nothing_first(name, base)
    return Detached(up.mount, max(0, _stored_bytes(writable) - before))


def _fetch_nothing_first(name: str, base: StrPath | None) -> None:
    """Have `up` fetch nothing ahead: nobody will read it from there any more."""
    with locked_volume(name, base) as volume:
        made = volume.made()
        if made.image is not None:
            nothing = {"first_bytes": 0, "trace": []}
            volume.write_made(replace(made, image=made.image | nothing))


def _stored_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512
