"""Files of a volume whose content is elsewhere: mapped, and cloned to their paths.

Each is made once. What the user makes of it then, is his: files.json says which were.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from btrfs_ublk.device import device_map
from btrfs_ublk.directories import missing_directories
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.interrupts import deferred
from btrfs_ublk.lazy import Addition, MapClient
from btrfs_ublk.log import step
from btrfs_ublk.records import sync
from btrfs_ublk.resources.reflink import clone_file
from btrfs_ublk.volumes.entry import VolumeFile
from btrfs_ublk.volumes.store import MadeFile, VolumeDirectory


def check_files(volume: VolumeDirectory, entries: Sequence[VolumeFile]) -> None:
    """Raise UsageError when a path was made from another source."""
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
    """Whether it was made, or was to be, of the entry's source."""
    return made is not None and entry.is_same_as(VolumeFile(made.path, made.source))


def add_files(
    volume: VolumeDirectory, top: Path, entries: Sequence[VolumeFile]
) -> list[MadeFile]:
    """Make those that were not made before, in the volume that is mounted at ``top``;
    they are on disk when this returns.

    Raises UsageError when a path is taken by what this has not made, BtrfsUblkError
    when a source does not answer or is refused. None of them is there then.
    """
    files = volume.files()
    new = [x for x in entries if x.path not in files or not files[x.path].is_whole]
    if not new:
        return []
    with step(f"map {len(new)} files"):
        for entry in new:
            place = place_in(top, entry.path)
            # What a killed command made of that source is the entry's.
            if os.path.lexists(place) and not _is_of(files.get(entry.path), entry):
                raise UsageError(
                    f"there is a file {entry.path!r} in volume {volume.name!r}, which "
                    "is not of its definition",
                    hint="move it away, or choose another path",
                )
        begun = _map(device_map(volume.name), new)
    with step(f"clone {len(new)} files"), ExitStack() as on_failure:
        # What cannot be written back is not whole, and stands in nobody's way.
        on_failure.callback(_undo, lambda: volume.write_files(files))
        # Before they appear: whoever finds one half made, knows whose it is.
        volume.write_files(files | {one.path: one for one in begun})
        virtual = top / volume.seed().virtual_data.filename
        for one in begun:
            place = place_in(top, one.path)
            for directory in reversed(missing_directories(place.parent)):
                on_failure.callback(_undo, directory.rmdir)
            if not os.path.lexists(place):
                on_failure.callback(_undo, place.unlink)
            _clone(virtual, place, one)
        done = [replace(one, is_whole=True) for one in begun]
        volume.write_files(files | {one.path: one for one in done})
        on_failure.pop_all()
    return done


def _undo(undo: Callable[[], object]) -> None:
    """On the way of an error, which is the one to tell."""
    with deferred(), suppress(OSError, BtrfsUblkError):
        undo()


def _map(client: MapClient, entries: Sequence[VolumeFile]) -> list[MadeFile]:
    added = client.add(
        [entry.source for entry in entries],
        [Addition(source=number) for number in range(len(entries))],
    )
    return [
        MadeFile(
            path=entry.path,
            source=entry.source,
            offset=where.offset,
            # A mapping is of whole blocks.
            size_bytes=client.show(offset=where.offset)["source"]["size"],
            is_whole=False,
        )
        for entry, where in zip(entries, added, strict=True)
    ]


def place_in(top: Path, path: str) -> Path:
    """Where a file is to be; no symbolic link in the volume leads out of it."""
    place = top / path
    parent = place.parent.resolve()
    if parent != top and top not in parent.parents:
        raise UsageError(f"{place} is outside of the volume: {parent}")
    return place


def _clone(virtual: Path, place: Path, one: MadeFile) -> None:
    # As short for a name of any length.
    half = place.with_name(f".btrfs-ublk-new.{zlib.crc32(os.fsencode(place.name)):08x}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        half.unlink(missing_ok=True)  # of a killed command
        clone_file(virtual, half, source_offset=one.offset, size_bytes=one.size_bytes)
        try:
            half.chmod(0o644)
            # NB: unlike a rename, this replaces nothing.
            with suppress(FileExistsError):  # the killed command came so far
                os.link(half, place)
        finally:
            half.unlink(missing_ok=True)
        sync(place)
        sync(place.parent)
    except OSError as error:
        raise BtrfsUblkError(f"cannot make {place}: {error.strerror}") from error
