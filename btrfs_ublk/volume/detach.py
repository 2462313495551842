"""Detaching the volume of an image: btrfs copies all data of the image to the device
that has what was written, and then needs the image's device no more
(docs/how-to/detaching.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import spawn
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import devices_of
from btrfs_ublk.units import MIB, exact_size
from btrfs_ublk.volume.image import up_with_image
from btrfs_ublk.volume.store import LOCK_TIMEOUT_S, volume_directory

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
    volume = volume_directory(name, base)
    with volume.locked(timeout_s=LOCK_TIMEOUT_S):
        made = volume.made()
        if made.image is not None and made.image.get("first_bytes"):
            volume.write_made(replace(made, image=made.image | {"first_bytes": 0}))


def _stored_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512
