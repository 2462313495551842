"""Files of a volume whose content is elsewhere: mapped, and cloned to their paths.

Each file is made once, and is the user's then. files.json lists which were made.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from btrfs_ublk import content
from btrfs_ublk import device as devices
from btrfs_ublk.base.log import step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.undo import undoing
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.beneath import existing_beneath, opened_directory, place_beneath
from btrfs_ublk.kernel.btrfs import commit_transaction, filesystem_uuid
from btrfs_ublk.kernel.reflink import clone_beneath, clone_in_directory
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.entry import VolumeFile
from btrfs_ublk.volume.report import mount_of
from btrfs_ublk.volume.sprout import virtual_file_of
from btrfs_ublk.volume.store import (
    MadeFile,
    VolumeDirectory,
    find_own_definition,
    locked_volume,
)

if TYPE_CHECKING:
    from btrfs_ublk.content.oci import Resolved

_FILE_MODE = 0o644


class Clone(NamedTuple):
    """A file to make: its path, its range of the virtual data, its modification time"""

    path: str
    offset: int
    size_bytes: int
    mtime_s: float | None = None


#: Paths below a directory, and how each is removed: os.unlink() or os.rmdir().
Made = list[tuple[str, Callable[..., None]]]


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
    """Whether the file has the entry's source, or would have, had it been made."""
    return made is not None and entry.is_same_as(VolumeFile(made.path, made.source))


def as_made(
    volume: VolumeDirectory, entries: tuple[VolumeFile, ...]
) -> tuple[VolumeFile, ...]:
    """Return the entries, with tags replaced as they were when the files were made."""
    if not any(entry.has_tag for entry in entries):
        return entries
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
    with (
        opened_top(volume, top) as top_fd,
        opened_virtual_data(volume, top_fd) as virtual,
        ExitStack() as on_failure,
    ):
        with step(f"map {len(new)} files"):
            there = existing_beneath(top_fd, [entry.path for entry in new])
            for entry in new:
                # A file that a killed command made from the entry's source is accepted.
                if entry.path in there and not _is_of(files.get(entry.path), entry):
                    raise UsageError(
                        f"there is a file {entry.path!r} in volume {volume.name!r}, "
                        "which is not of its definition",
                        hint="move it away, or choose another path",
                    )
            client = devices.device_map(volume.name)
            begun = map_files(client, as_made(volume, tuple(new)), resolved)
        with step(f"clone {len(new)} files"):
            # If this fails, the entries are not whole, so a later command may replace
            # them.
            on_failure.push(undoing(lambda: volume.write_files(files)))
            # Recorded before they appear, so that a half-made file is known to be ours.
            volume.write_files(files | {one.path: one for one in begun})
            made: Made = []
            on_failure.push(undoing(lambda: remove_made(top_fd, made)))
            clones = [Clone(x.path, x.offset, x.size_bytes) for x in begun]
            make_clones(
                virtual, top_fd, (x for x in clones if x.path not in there), made
            )
            # One commit for all of them, and for those that were accepted.
            commit_transaction(Path(f"/proc/self/fd/{top_fd}"))
            done = [replace(one, is_whole=True) for one in begun]
            volume.write_files(files | {one.path: one for one in done})
            on_failure.pop_all()
    return done


def map_files(
    client: content.MapClient,
    entries: Sequence[VolumeFile],
    resolved: Resolved | None = None,
) -> list[MadeFile]:
    """Map all files in one request. Raises as MapClient.add() does."""
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


def make_clones(virtual: Path, top: int, clones: Iterable[Clone], made: Made) -> None:
    """Make files below a directory, and directories that are missing. Each is whole
    when it has its name, and nothing is synced. ``made`` gets what appears. Raises
    UsageError for a path that is taken, or leads elsewhere, BtrfsUblkError."""

    def note_directory(path: str) -> None:
        made.append((path, os.rmdir))

    groups = groupby(
        sorted(clones, key=lambda one: os.path.split(one.path)),
        lambda one: os.path.dirname(one.path),
    )
    at = ""
    try:
        with open(virtual, "rb", buffering=0) as data:
            for at, group in groups:
                inside = os.path.join(at, ".")
                with place_beneath(top, inside, made=note_directory) as (parent, _):
                    for at, offset, size_bytes, mtime_s in group:
                        made.append((at, os.unlink))
                        clone_in_directory(
                            data.fileno(),
                            parent,
                            os.path.basename(at),
                            source_offset=offset,
                            size_bytes=size_bytes,
                            mode=_FILE_MODE,
                            mtime_s=mtime_s,
                        )
    except FileExistsError as error:
        made.pop()
        raise UsageError(f"there is a {at!r} already") from error
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BtrfsUblkError(
            f"cannot make {at!r}: {why}", hint="is there room? btrfs-ublk volume resize"
        ) from error


def remove_made(top: int, made: Made) -> None:
    """Remove what make_clones() has made, but for what others have changed since."""
    for path, remove in reversed(made):
        with suppress(OSError, UsageError), place_beneath(top, path) as (parent, name):
            remove(name, dir_fd=parent)


@contextmanager
def _editing(
    name: str, base: StrPath | None
) -> Iterator[tuple[VolumeDirectory, Path, VolumeDefinition]]:
    """Lock a volume that is up; yield it, its mount point and its definition."""
    with locked_volume(name, base) as volume:
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
    with locked_volume(name, base) as volume:
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
    mapped = devices.device_map(name).list(start=offset, end=end)
    return size_bytes - sum(
        min(one.offset + one.length, end) - max(one.offset, offset) for one in mapped
    )
