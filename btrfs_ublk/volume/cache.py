"""A volume's cache: its directory and its size limit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress

from btrfs_ublk import content
from btrfs_ublk.base.private_dirs import make_private, missing_directories
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.errors import UsageError
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.store import VolumeDirectory

#: The files of a cache that has no contents (docs/cache.md).
_OF_NO_CONTENT = {"lock", "state", "limits", "limits.new"}
#: A server that is ending may still have the cache open for a moment.
_IN_USE_TIMEOUT_S = 2.0


def prepare_cache(volume: VolumeDirectory, definition: VolumeDefinition) -> None:
    """Make the cache's directory, if missing, with its limit. An existing one, which
    others may use, gets it only when all else has succeeded. Raises BtrfsUblkError for
    a directory that is not this user's alone.
    """
    path = volume.cache_of(definition)
    is_new = not path.exists()
    make_private(path, what="cache", hint="name another directory as cache")
    if is_new:
        limit_cache(volume, definition)


def undoing_cache(
    volume: VolumeDirectory, definition: VolumeDefinition
) -> Callable[[], None]:
    """Return a function that removes the directories which prepare_cache() will make;
    it is called once the device is gone. A cache with contents, or in use, stays.
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
            with suppress(OSError):  # it is not empty
                directory.rmdir()

    return undo


def limit_cache(volume: VolumeDirectory, definition: VolumeDefinition) -> None:
    """Set the cache's limit; without one, lift only that of the last definition."""
    path, max_bytes = volume.cache_of(definition), definition.cache_max_bytes
    if max_bytes is None:
        try:
            kept = volume.definition(files=False)
        except UsageError:
            return
        if kept.cache_max_bytes is None or volume.cache_of(kept) != path:
            return
    content.Cache(path).limit(max_bytes=max_bytes or 0, reserve_bytes=None)
