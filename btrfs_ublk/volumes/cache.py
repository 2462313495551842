"""A volume's cache: its directory, and its cap."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress

from btrfs_ublk.cache import Cache
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.directories import make_private, missing_directories
from btrfs_ublk.errors import UsageError
from btrfs_ublk.volumes.definition import VolumeDefinition
from btrfs_ublk.volumes.store import VolumeDirectory

#: What is in a cache without contents (docs/cache.md).
_OF_NO_CONTENT = {"lock", "state", "limits", "limits.new"}
#: A server that was told to end may have it open for a moment.
_IN_USE_TIMEOUT_S = 2.0


def prepare_cache(volume: VolumeDirectory, definition: VolumeDefinition) -> None:
    """Its cap as well, where it is made for that: one that others may use gets that
    only when all has gone well. Raises BtrfsUblkError for a directory that is not ours
    alone.
    """
    path = volume.cache_of(definition)
    is_new = not path.exists()
    make_private(path, what="cache", hint="name another directory as cache")
    if is_new:
        limit_cache(volume, definition)


def undoing_cache(
    volume: VolumeDirectory, definition: VolumeDefinition
) -> Callable[[], None]:
    """What removes the directories that prepare_cache() will make, if any: to be called
    when the device is gone. One with contents, or that somebody else uses, stays.
    """
    path = volume.cache_of(definition)
    missing = missing_directories(path)

    def undo() -> None:
        if not missing or not path.is_dir():
            return
        if _OF_NO_CONTENT.issuperset(each.name for each in path.iterdir()):
            lock = lock_file(path / "state", timeout_s=_IN_USE_TIMEOUT_S)
            if lock is not None:
                with lock:
                    shutil.rmtree(path)
        for directory in missing[1:]:
            with suppress(OSError):  # something is in it
                directory.rmdir()

    return undo


def limit_cache(volume: VolumeDirectory, definition: VolumeDefinition) -> None:
    """A cap that was the definition's goes with it; others may have set one, too."""
    path, max_bytes = volume.cache_of(definition), definition.cache_max_bytes
    if max_bytes is None:
        try:
            kept = volume.definition()
        except UsageError:
            return
        if kept.cache_max_bytes is None or volume.cache_of(kept) != path:
            return
    Cache(path).limit(max_bytes=max_bytes or 0, reserve_bytes=None)
