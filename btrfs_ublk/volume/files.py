"""Files of a volume whose content is elsewhere: mapped, and cloned to their paths.

Each file is made once, and is the user's then. files.json lists which were made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from btrfs_ublk import content
from btrfs_ublk import device as devices
from btrfs_ublk.base.log import step
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.beneath import (
    exists_beneath,
    opened_directory,
    place_beneath,
)
from btrfs_ublk.kernel.btrfs import filesystem_uuid
from btrfs_ublk.kernel.reflink import clone_beneath
from btrfs_ublk.volume.entry import VolumeFile
from btrfs_ublk.volume.store import MadeFile, VolumeDirectory
from btrfs_ublk.volume.virtual_file import virtual_file_of

if TYPE_CHECKING:
    from btrfs_ublk.content.oci import Resolved


def check_files(volume: VolumeDirectory, entries: Sequence[VolumeFile]) -> None:
    """Raise UsageError when a path was already made from another source."""
    files = volume.files()
    for entry in entries:
        made = files.get(entry.path)
        if made is not None and made.is_whole and not _is_of(made, entry):
            before = VolumeFile(made.path, made.source)
            raise UsageError(
                f"file {entry.path!r} of volume {volume.name!r} is mapped to "
                f"{before.origin}, and was to come from {entry.origin}",
                hint="what is mapped stays: choose another path for the new one",
            )


def _is_of(made: MadeFile | None, entry: VolumeFile) -> bool:
    """Whether the file was made, or was to be made, from the entry's source."""
    return made is not None and entry.is_same_as(VolumeFile(made.path, made.source))


def as_made(
    volume: VolumeDirectory, entries: Sequence[VolumeFile]
) -> tuple[VolumeFile, ...]:
    """Return the entries, with tags replaced as they were when the files were made."""
    files = volume.files()
    return tuple(
        (
            VolumeFile(entry.path, files[entry.path].source)
            if entry.has_tag and _is_of(files.get(entry.path), entry)
            else entry
        )
        for entry in entries
    )


def add_files(
    volume: VolumeDirectory,
    top: Path,
    entries: Sequence[VolumeFile],
    *,
    resolved: Resolved | None = None,
) -> list[MadeFile]:
    """Make the files that were not made before, in the volume mounted at ``top``. They
    are on disk when this returns.

    Raises UsageError when another file has the path, BtrfsUblkError when a source does
    not answer or is refused. None of the new files is there then.
    """
    files = volume.files()
    new = [x for x in entries if x.path not in files or not files[x.path].is_whole]
    if not new:
        return []
    with opened_top(volume, top) as top_fd:
        return _add_new(volume, top_fd, new, resolved)


def _add_new(
    volume: VolumeDirectory,
    top: int,
    new: Sequence[VolumeFile],
    resolved: Resolved | None,
) -> list[MadeFile]:
    files = volume.files()
    with step(f"map {len(new)} files"):
        for entry in new:
            # A file that a killed command made from the entry's source is accepted.
            if exists_beneath(top, entry.path) and not _is_of(
                files.get(entry.path), entry
            ):
                raise UsageError(
                    f"there is a file {entry.path!r} in volume {volume.name!r}, which "
                    "is not of its definition",
                    hint="move it away, or choose another path",
                )
        begun = _map(devices.device_map(volume.name), as_made(volume, new), resolved)
    with (
        step(f"clone {len(new)} files"),
        ExitStack() as work,
        ExitStack() as on_failure,
    ):
        # If this fails, the entries are not whole, so a later command may replace them.
        on_failure.callback(_undo, lambda: volume.write_files(files))
        # Recorded before they appear, so that a half-made file is known to be ours.
        volume.write_files(files | {one.path: one for one in begun})
        virtual = work.enter_context(opened_virtual_data(volume, top))
        for one in begun:
            if exists_beneath(top, one.path):
                _sync(top, one.path)
            else:
                _clone(virtual, top, one, on_failure)
        done = [replace(one, is_whole=True) for one in begun]
        volume.write_files(files | {one.path: one for one in done})
        on_failure.pop_all()
    return done


def _undo(undo: Callable[[], object]) -> None:
    """Undo a step after an error; further failures are not reported."""
    with deferred(), suppress(OSError, BtrfsUblkError):
        undo()


def _map(
    client: content.MapClient, entries: Sequence[VolumeFile], resolved: Resolved | None
) -> list[MadeFile]:
    fetched = [entry for entry in entries if not entry.is_empty]
    names = [f"file {entry.path!r}" for entry in fetched]
    sources = client.resolve(
        [entry.source for entry in fetched], resolved=resolved, names=names
    )
    added = client.add(
        sources,
        [content.Addition(source=number) for number in range(len(fetched))],
        names=names,
    )
    places = {
        entry.path: (source, where.offset, where.size_bytes)
        for entry, source, where in zip(fetched, sources, added, strict=True)
    }

    def made(entry: VolumeFile) -> MadeFile:
        source, offset, size_bytes = places.get(entry.path, (entry.source, 0, 0))
        return MadeFile(
            path=entry.path,
            source=source,
            offset=offset,
            size_bytes=size_bytes,
            is_whole=False,
        )

    return [made(entry) for entry in entries]


@contextmanager
def opened_top(volume: VolumeDirectory, top: Path) -> Iterator[int]:
    """Open the top directory of a mounted volume. Raises BtrfsUblkError when something
    else is mounted there: the owner of the parent directory may have moved it.
    """
    with ExitStack() as opened:
        try:
            fd = opened.enter_context(opened_directory(top))
        except OSError as error:
            raise BtrfsUblkError(f"{top}: {error.strerror}") from error
        # NB: this asks about the open descriptor, which the caller works on.
        if filesystem_uuid(Path(f"/proc/self/fd/{fd}")) != volume.fsid():
            raise BtrfsUblkError(
                f"{top} is not volume {volume.name!r} any more",
                hint="its mount point was moved; see: findmnt -t btrfs",
            )
        yield fd


def opened_virtual_data(
    volume: VolumeDirectory, top: int
) -> AbstractContextManager[Path]:
    """Open the virtual file, from which files are cloned. Raises UsageError when there
    is none.
    """
    if volume.made().image is not None:
        raise UsageError(
            f"volume {volume.name!r} was made of an image, whose data have their files",
            hint="add files to another volume",
        )
    return virtual_file_of(volume.seed(), Path(f"/proc/self/fd/{top}"))


def _clone(virtual: Path, top: int, one: MadeFile, on_failure: ExitStack) -> None:
    is_ours = True

    def remove_directory(path: str) -> None:
        with place_beneath(top, path) as (directory, name):
            os.rmdir(name, dir_fd=directory)

    def remove_file() -> None:
        with place_beneath(top, one.path) as (directory, name):
            if is_ours:
                os.unlink(name, dir_fd=directory)

    def made(path: str) -> None:
        on_failure.callback(_undo, lambda: remove_directory(path))

    try:
        with place_beneath(top, one.path, made=made):
            on_failure.callback(_undo, remove_file)
        clone_beneath(
            virtual,
            top,
            one.path,
            source_offset=one.offset,
            size_bytes=one.size_bytes,
            mode=0o644,
            synced=True,
        )
    except FileExistsError as error:
        is_ours = False
        raise UsageError(f"another program has just made {one.path!r}") from error
    except OSError as error:
        raise BtrfsUblkError(f"cannot make {one.path!r}: {error.strerror}") from error


def _sync(top: int, path: str) -> None:
    """Sync a file that a killed command has made."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError), place_beneath(top, path) as (directory, name):
        with FileIO(name, opener=lambda x, _: os.open(x, flags, dir_fd=directory)) as f:
            os.fsync(f.fileno())
            os.fsync(directory)
