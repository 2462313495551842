"""Adding and removing files of a volume that is up, and cloning ranges of its data."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device import device_map
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.beneath import place_beneath
from btrfs_ublk.kernel.reflink import clone_beneath
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.entry import VolumeFile
from btrfs_ublk.volume.files import add_files, as_made, opened_top, opened_virtual_data
from btrfs_ublk.volume.report import mount_of
from btrfs_ublk.volume.store import (
    LOCK_TIMEOUT_S,
    MadeFile,
    VolumeDirectory,
    find_own_definition,
    volume_directory,
)

if TYPE_CHECKING:
    from btrfs_ublk.content.oci import Resolved


@contextmanager
def _editing(
    name: str, base: StrPath | None
) -> Iterator[tuple[VolumeDirectory, Path, VolumeDefinition]]:
    """Lock a volume that is up; yield it, its mount point and its definition."""
    volume = volume_directory(name, base)
    volume.check()
    with volume.locked(timeout_s=LOCK_TIMEOUT_S):
        definition = find_own_definition(name, base=base)
        yield volume, mount_of(volume), definition


def add_file(
    name: str,
    entry: VolumeFile,
    *,
    base: StrPath | None = None,
    resolved: Resolved | None = None,
) -> tuple[Path, MadeFile]:
    """Make a file in a volume that is up, and keep it in the definition. Returns its
    path, and what was made. Raises UsageError for a path that is taken, or a volume
    that can have no files, BtrfsUblkError: nothing has changed then."""
    with _editing(name, base) as (volume, mount, definition):
        if entry.path in volume.files():
            raise UsageError(
                f"volume {name!r} has had a file {entry.path!r} already",
                hint=f"first: btrfs-ublk volume remove-file {name} {entry.path}; or "
                "choose another path",
            )
        changed = definition.with_files([entry])
        (made,) = add_files(volume, mount, [entry], resolved=resolved)
        volume.write_definition(replace(changed, files=as_made(volume, changed.files)))
        return mount / entry.path, made


def remove_file(name: str, path: str, *, base: StrPath | None = None) -> None:
    """Remove a file of the definition from a volume that is up, with what was written
    to it; it may be gone already. Its content stays mapped. If this is killed, the next
    call completes it. Raises UsageError when there is none, BtrfsUblkError."""
    path = VolumeFile(path, {"size": 0}).path
    with _editing(name, base) as (volume, mount, definition):
        files = volume.files()
        others = tuple(x for x in definition.files if x.path != path)
        if path not in files and len(others) == len(definition.files):
            raise UsageError(
                f"volume {name!r} has no file {path!r} in its definition",
                hint=f"see: btrfs-ublk volume status {name}",
            )
        with deferred(), opened_top(volume, mount) as top:
            try:
                _unlink(top, path)
            except OSError as error:
                raise BtrfsUblkError(
                    f"cannot remove {mount / path}: {error.strerror}"
                ) from error
            # NB: as long as it is in files.json, `up` does not make it again.
            volume.write_definition(replace(definition, files=others))
            files.pop(path, None)
            volume.write_files(files)


def _unlink(top: int, path: str) -> None:
    with suppress(FileNotFoundError), place_beneath(top, path) as (directory, name):
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(
                f"{path!r} is a directory now, which somebody else has made",
                hint="move it away",
            )
        os.unlink(name, dir_fd=directory)
        os.fsync(directory)


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
