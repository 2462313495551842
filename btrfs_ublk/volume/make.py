"""A volume's directory: made completely or not at all, and removed completely."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from btrfs_ublk import seed as seeds
from btrfs_ublk.base.jsonfile import sync
from btrfs_ublk.base.log import step
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.locks import Lock, is_locked, lock_file, registry_locked
from btrfs_ublk.device.state import half_made, half_path
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.sprout import make_writable_file
from btrfs_ublk.volume.store import LOCK_TIMEOUT_S, Made, VolumeDirectory

#: Makes the seed in the directory of a volume; returns what is kept of its image, too.
MakeSeed = Callable[[VolumeDirectory], tuple[seeds.Seed, dict[str, Any] | None]]


def open_or_make(
    volume: VolumeDirectory,
    definition: VolumeDefinition,
    make_seed: MakeSeed | None = None,
) -> tuple[Lock, bool]:
    """Lock a volume. Returns the lock, and if it was made: with a seed of virtual data,
    or by ``make_seed``. Raises BtrfsUblkError."""
    with registry_locked(volume.path.parent):
        if not os.path.lexists(volume.path):
            return _make(volume, definition, make_seed), True
    volume.check()
    return volume.locked(timeout_s=LOCK_TIMEOUT_S), False


def _make(
    volume: VolumeDirectory, definition: VolumeDefinition, make_seed: MakeSeed | None
) -> Lock:
    """Make the volume; the caller holds the registry's lock."""
    tag = os.urandom(8).hex()
    half = VolumeDirectory(half_path(volume.path, tag))
    with step(f"make volume {volume.name}"), ExitStack() as on_failure:
        on_failure.callback(shutil.rmtree, half.path, ignore_errors=True)
        try:
            half.path.mkdir(mode=0o700)
            lock = lock_file(half.lock)
            assert lock is not None
            on_failure.callback(lock.close)
            half.ledgers.mkdir(mode=0o700)
            image = None
            if make_seed is not None:
                seed, image = make_seed(half)
            else:
                seed = seeds.make_seed(
                    half.seed_image,
                    virtual_data_size=definition.size_bytes,
                    label=volume.name,
                    metadata_only=True,
                )
            half.write_made(
                Made(
                    tag=tag,
                    size_bytes=seed.virtual_data.size,
                    writable_bytes=definition.writable_bytes,
                    seed=seed.to_dict(),
                    image=image,
                )
            )
            half.write_definition(definition)
            # As all else that a volume keeps, it is its owner's alone.
            half.seed_image.chmod(0o600)
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


def remove_halves(volumes: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove what dead commands left half-made, but not what is being removed now.
    Returns what was, or would be, removed. Raises BtrfsUblkError."""
    if not any(half_made(volumes)):
        return []
    with registry_locked(volumes):  # makers hold it meanwhile
        halves = [
            path
            for path in half_made(volumes)
            if not is_locked(VolumeDirectory(path).lock)
        ]
    with deferred():
        for path in [] if dry_run else halves:
            shutil.rmtree(path, ignore_errors=True)
    return halves


def prepare_sprout(volume: VolumeDirectory, size_bytes: int) -> None:
    """Make the image for written data. What a killed command left there is lost. Raises
    BtrfsUblkError."""
    try:
        volume.sprout_image.unlink(missing_ok=True)
        make_writable_file(volume.sprout_image, size_bytes)
        sync(volume.sprout_image)
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot sprout in {volume.path}: {error.strerror}",
            hint="is its disk full, or read-only?",
        ) from error


def discard(volume: VolumeDirectory) -> None:
    """Remove a volume's directory with all its data; the caller holds its lock. Raises
    LeftoverError, also when a loop device uses its image.
    """
    for device, image in loops_below(volume.path):
        raise LeftoverError(
            f"volume {volume.name!r} is not removed: {device} stands on {image}",
            hint=f"first: btrfs-ublk volume down {volume.name}",
        )
    # The rename frees the name at once, even if the removal is interrupted.
    gone = half_path(volume.path, os.urandom(8).hex())
    try:
        with deferred(), registry_locked(volume.path.parent):
            volume.path.rename(gone)
            sync(gone.parent)
        # NB: a large cache takes long, so the registry is unlocked. The cache goes
        # first, as remove_halves() leaves a directory alone while its lock is held.
        for path in (VolumeDirectory(gone).cache, gone):
            while path.is_dir() and not path.is_symlink():
                with suppress(FileNotFoundError):  # another process removes it
                    shutil.rmtree(path)
    except OSError as error:
        raise LeftoverError(f"cannot remove {volume.path}: {error}") from error
