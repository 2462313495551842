"""A volume's directory: made as a whole, and removed as a whole."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from btrfs_ublk.device.locks import Lock, is_locked, lock_file, registry_locked
from btrfs_ublk.device.state import half_made, half_path
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError
from btrfs_ublk.interrupts import deferred
from btrfs_ublk.log import step
from btrfs_ublk.records import sync
from btrfs_ublk.resources.tempdir import loops_below
from btrfs_ublk.seed import make_seed
from btrfs_ublk.sprout import make_writable_file
from btrfs_ublk.volumes.definition import VolumeDefinition
from btrfs_ublk.volumes.store import Made, VolumeDirectory

#: Another command may work on a volume: fetching nothing, but waiting for a server.
LOCK_TIMEOUT_S = 60.0


def open_or_make(
    volume: VolumeDirectory, definition: VolumeDefinition
) -> tuple[Lock, bool]:
    """A volume's lock, and whether it was made for that. Raises BtrfsUblkError."""
    with registry_locked(volume.path.parent):
        if not os.path.lexists(volume.path):
            return _make(volume, definition), True
    volume.check()
    return volume.locked(timeout_s=LOCK_TIMEOUT_S), False


def _make(volume: VolumeDirectory, definition: VolumeDefinition) -> Lock:
    """For who has the registry locked."""
    tag = secrets.token_hex(8)
    half = VolumeDirectory(half_path(volume.path, tag))
    with step(f"make volume {volume.name}"), ExitStack() as on_failure:
        on_failure.callback(shutil.rmtree, half.path, ignore_errors=True)
        try:
            half.path.mkdir(mode=0o700)
            lock = lock_file(half.lock)
            assert lock is not None
            on_failure.callback(lock.close)
            half.ledgers.mkdir(mode=0o700)
            seed = make_seed(
                half.seed_image,
                virtual_data_size=definition.size_bytes,
                label=volume.name,
                metadata_only=True,
            )
            half.write_made(
                Made(
                    tag=tag,
                    size_bytes=definition.size_bytes,
                    writable_bytes=definition.writable_bytes,
                    seed=seed.to_dict(),
                )
            )
            half.write_definition(definition)
            sync(half.seed_image)
            half.path.rename(volume.path)
            sync(volume.path.parent)
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot make volume {volume.path}: {error.strerror}",
                hint="is its disk full, or read-only?",
            ) from error
        on_failure.pop_all()
    return lock


def remove_halves(volumes: Path) -> None:
    """Of commands that have died. Those that somebody is just removing are his."""
    with registry_locked(volumes):  # whoever makes one holds it meanwhile
        halves = [
            path
            for path in half_made(volumes)
            if not is_locked(VolumeDirectory(path).lock)
        ]
    for path in halves:
        shutil.rmtree(path, ignore_errors=True)


def prepare_sprout(volume: VolumeDirectory, size_bytes: int) -> None:
    """What is to take its writes, on disk, and where it is mounted while it sprouts.
    What a killed command left there is lost. Raises BtrfsUblkError.
    """
    try:
        volume.sprout_image.unlink(missing_ok=True)
        make_writable_file(volume.sprout_image, size_bytes)
        sync(volume.sprout_image)
        volume.sprouting.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot sprout in {volume.path}: {error.strerror}",
            hint="is its disk full, or read-only?",
        ) from error


def discard(volume: VolumeDirectory) -> None:
    """Remove a volume's directory, and all that it keeps, for who has it locked.

    Raises LeftoverError, also when its image is in use by a loop device.
    """
    for device, image in loops_below(volume.path):
        raise LeftoverError(
            f"volume {volume.name!r} is not removed: {device} stands on {image}",
            hint=f"first: btrfs-ublk volume down {volume.name}",
        )
    # The name is free at once, whatever comes in between.
    gone = half_path(volume.path, secrets.token_hex(8))
    try:
        with deferred(), registry_locked(volume.path.parent):
            volume.path.rename(gone)
        # NB: a large cache takes its time, so nobody waits for that. It goes first, as
        # remove_halves() leaves alone what has a lock that is held.
        for path in (VolumeDirectory(gone).cache, gone):
            while path.is_dir() and not path.is_symlink():
                with suppress(FileNotFoundError):  # somebody else removes it as well
                    shutil.rmtree(path)
    except OSError as error:
        raise LeftoverError(f"cannot remove {volume.path}: {error}") from error
