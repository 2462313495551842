"""Whole trees in volumes of virtual data: files that are clones of ranges of an image's
data object, which is mapped (docs/design/images.md).

A tree is made in a subvolume of its own, under a name that adding.json knows, and gets
its path last. What a killed command has left is removed by the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from btrfs_ublk import content
from btrfs_ublk import device as devices
from btrfs_ublk.base.helpers import READIMAGE, helper_path
from btrfs_ublk.base.jsonfile import sync
from btrfs_ublk.base.log import log, step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import spawn
from btrfs_ublk.base.progress import Task
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.undo import undoing
from btrfs_ublk.content import SourceKeys
from btrfs_ublk.device.locks import Lock
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.attributes import NO_COW, add_attributes
from btrfs_ublk.kernel.beneath import (
    exists_beneath,
    opened_beneath,
    place_beneath,
    rename_beneath,
)
from btrfs_ublk.kernel.btrfs import (
    commit_transaction,
    create_subvolume,
    delete_subvolume_number,
    filesystem_uuid,
    is_subvolume,
    subvolume_id,
    subvolume_name,
)
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.volume.entry import VolumeTree, origin_of, path_beneath
from btrfs_ublk.volume.files import (
    Clone,
    make_clones,
    opened_top,
    opened_virtual_data,
    remove_made,
)
from btrfs_ublk.volume.report import mount_of
from btrfs_ublk.volume.store import (
    HalfTree,
    MadeTree,
    VolumeDirectory,
    volume_directory,
)

if TYPE_CHECKING:
    from btrfs_ublk.image.access import RegistryAccess
    from btrfs_ublk.image.reference import Name
    from btrfs_ublk.volume.listing import Listing

#: A bound for what would otherwise wait for ever.
_TIMEOUT_S = 86400.0
_PREFIX = ".btrfs-ublk-adding-"
_DIRECTORY_MODE = 0o755


@dataclass(frozen=True)
class AddedTree:
    """A tree that was added. ``cloned_bytes`` of its files are shared with the data
    object, and ``written_bytes`` were written: small files. ``data`` is the file with
    the data object, where that was made for the tree."""

    path: Path
    entries: int
    cloned_bytes: int
    written_bytes: int
    data: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        data = None if self.data is None else str(self.data)
        return vars(self) | {"path": str(self.path), "data": data}


@dataclass(frozen=True)
class _Image:
    """An image as it lies on this machine: its metadata, the number of the subvolume,
    and where its data are read; ``new_data`` becomes the file that ``source``
    names, unless that is there."""

    seed: Path
    subvolume: int
    data_bytes: int
    source: SourceKeys | None
    what: str
    new_data: Path | None = None

    @property
    def root(self) -> str:
        return str((self.source or {})["root"])


def add_image(
    name: str,
    image: Name,
    path: str | None = None,
    *,
    layer: str | None = None,
    access: RegistryAccess,
    base: StrPath | None = None,
    task: Task = Task(),
) -> AddedTree:
    """Make the tree of a sealed image again in a volume of virtual data that is up, in
    a new subvolume ``path``. No data are moved but those of small files.

    ``layer`` is the chain ID of another layer than the last. Raises UsageError for a
    volume or path that cannot be, BtrfsUblkError for an image whose data are
    compressed, and what finding() raises. Nothing is left in the volume then, but
    the mapping of the data object, if that is the image's first tree.
    """
    from btrfs_ublk.image.pack import check_data, unpack
    from btrfs_ublk.volume.image_seed import find_named_image

    volume = volume_directory(name, base)
    volume.check()
    task.say("look the image up")
    found = find_named_image(image, access)
    if found.layer is not None:
        raise UsageError(
            f"the data of {image} are in its ordinary layers (`image index`), and a "
            "tree needs them in one object",
            hint="make a sealed image of it: btrfs-ublk image build --compression none",
        )
    with tempdir() as work:
        seed = work / "seed.img"
        header, digests = unpack(found.pack(), seed)
        check_data(header, found.data_bytes)
        digests.write(work / "digests")
        chosen = next(
            (x for x in header.layers[::-1] if layer in (None, x.chain_id)), None
        )
        if chosen is None:
            raise UsageError(
                f"{image} has no layer {layer}",
                hint=f"there are: {', '.join(x.chain_id for x in header.layers)}",
            )
        source = None
        if found.mirror is not None:
            source = _source(
                found.mirror, header.data_bytes, header.unit, header.root, work
            )
        one = _Image(
            seed, chosen.subvolume, header.data_bytes, source, f"the data of {image}"
        )
        return _add(volume, one, path or _name_of(image), task)


def add_tree(
    name: str,
    source: Name | Path,
    path: str,
    *,
    platform: str | None = None,
    access: RegistryAccess,
    base: StrPath | None = None,
    task: Task = Task(),
) -> AddedTree:
    """Do as add_image(), with an image that is made for it of a directory, a tar, or an
    ordinary image. Its data object, in which equal content is once, stays in the
    directory of the volume. Raises as build_image() does, too."""
    from btrfs_ublk.content.digests import Digests
    from btrfs_ublk.image.build import BuildOptions, make_image
    from btrfs_ublk.image.layout import Layout
    from btrfs_ublk.image.source import open_source

    volume = volume_directory(name, base)
    volume.check()
    try:
        volume.trees.mkdir(mode=0o700, exist_ok=True)
        with tempdir(parent=volume.trees) as work:
            task.say(f"read {source}")
            opened = open_source(
                source, Layout.made(work / "layout"), access, platform=platform
            )
            made = work / "image"
            report = make_image(opened, made, BuildOptions(compression="none"))
            data = made / "data"
            digests = Digests(
                data.stat().st_size, report["unit"], (made / "digests").read_bytes()
            )
            digests.write(work / "digests")
            size_bytes, unit, root = digests.size_bytes, report["unit"], digests.root
            kept = volume.trees / root
            place: SourceKeys = {"kind": "file", "path": str(kept)}
            one = _Image(
                made / "seed.img",
                report["layers"][-1]["subvolume"],
                size_bytes,
                _source(place, size_bytes, unit, root, work) if size_bytes else None,
                f"the data of {source}",
                data if size_bytes else None,
            )
            return _add(volume, one, path, task)
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot read {source} into {volume.trees}: {error.strerror or error}",
            hint="is its disk full, or read-only?",
        ) from error
    finally:
        with suppress(OSError):  # it has data objects
            volume.trees.rmdir()


def list_trees(
    volume: VolumeDirectory, wanted: Sequence[VolumeTree]
) -> list[tuple[VolumeTree, Listing]]:
    """Read what is listed of the trees that were not made before. Raises UsageError for
    a path that was made of another source, and as read_listing() does."""
    if not wanted:
        return []
    from btrfs_ublk.volume.listing import read_listing

    made = {}
    if os.path.lexists(volume.path):
        volume.check()
        half = volume.half_tree()  # it may have to be made again
        made = {
            one.path: VolumeTree(one.path, one.source)
            for one in volume.made_trees()
            if half is None or one.subvolume != half.subvolume
        }
    for tree in wanted:
        before = made.get(tree.path, tree)
        if not tree.is_same_as(before):
            raise UsageError(
                f"tree {tree.path!r} of volume {volume.name!r} was made of "
                f"{before.origin}, and was to come from {tree.origin}",
                hint="choose another path for the new one",
            )
    listed = []
    for tree in wanted:
        if tree.path not in made:
            with step(f"read what {origin_of(tree.source)} lists"):
                listed.append((tree, read_listing(tree.source)))
    return listed


def add_listed(
    volume: VolumeDirectory, target: Path, tree: VolumeTree, listing: Listing
) -> None:
    """Make a listed tree in the volume mounted at ``target``, whose lock the caller
    has, and record that it was made. Raises as add_tree() does."""
    with opened_top(volume, target) as top, opened_virtual_data(volume, top) as virtual:
        _remove_half(volume, top)
        path = _checked(volume, top, tree.path)
        with _adding(volume, top, path, None) as directory:
            size_bytes = _fill(volume, directory, virtual, listing)
            mount = Path(f"/proc/self/fd/{directory}")
            commit_transaction(mount)
            half = volume.half_tree()
            assert half is not None
            made = MadeTree(
                path=tree.path,
                source=tree.source,
                subvolume=subvolume_id(mount),
                directories=half.directories,
                files=len(listing.files),
                size_bytes=size_bytes,
            )
            # If this is killed before the tree has its path, that is forgotten.
            volume.write_made_trees([*volume.made_trees(), made])


def remove_listed(volume: VolumeDirectory, target: Path, path: str) -> None:
    """Take back add_listed(), if that was done."""
    for made in volume.made_trees():
        if made.path == path:
            with opened_top(volume, target) as top:
                mount = Path(f"/proc/self/fd/{top}")
                delete_subvolume_number(mount, made.subvolume)
                remove_made(top, [(x, os.rmdir) for x in made.directories])
            volume.forget_made_tree(made.subvolume)


def _fill(
    volume: VolumeDirectory, directory: int, virtual: Path, listing: Listing
) -> int:
    """Map all that is listed, in one request, and clone it below a directory; return
    how many bytes that is."""
    files = sorted(listing.files.values(), key=lambda file: os.path.split(file.path))
    mapped = [file for file in files if file.source != {"size": 0}]
    with step(f"map {len(mapped)} files"):
        added = devices.device_map(volume.name).add(
            [file.source for file in mapped],
            [content.Addition(source=number) for number in range(len(mapped))],
            names=[f"file {file.path!r}" for file in mapped],
        )
    clones = [
        Clone(file.path, at.offset, at.size_bytes, file.mtime_s)
        for file, at in zip(mapped, added, strict=True)
    ]
    clones += [Clone(x.path, 0, 0, x.mtime_s) for x in files if x.source == {"size": 0}]
    at = ""
    try:
        for at in sorted(listing.directories):
            with place_beneath(directory, at) as (parent, name):
                os.mkdir(name, dir_fd=parent)
                os.chmod(name, _DIRECTORY_MODE, dir_fd=parent)
        os.fchmod(directory, _DIRECTORY_MODE)
    except OSError as error:
        raise BtrfsUblkError(f"cannot make {at!r}: {error.strerror}") from error
    make_clones(virtual, directory, clones, [])
    return sum(place.size_bytes for place in added)


def _source(
    mirror: SourceKeys, size_bytes: int, unit: int, root: str, work: Path
) -> SourceKeys:
    return mirror | {
        "size": size_bytes,
        "unit": unit,
        "root": root,
        "digests": {"path": str(work / "digests")},
    }


def _name_of(image: Name) -> str:
    """Return the path that a tree has when none is given."""
    from btrfs_ublk.image.reference import DEFAULT_TAG, LayoutName

    if isinstance(image, LayoutName):
        return image.tag or DEFAULT_TAG
    return image.repository.rpartition("/")[2]


def _add(volume: VolumeDirectory, image: _Image, path: str, task: Task) -> AddedTree:
    task.say("look at its files")
    total, *_ = _make(image, Task())
    with volume.locked() as lock:
        mount = mount_of(volume)
        with (
            opened_top(volume, mount) as top,
            opened_virtual_data(volume, top) as virtual,
        ):
            _remove_half(volume, top)
            path = _checked(volume, top, path)
            task.say("make its files")
            task.expect(total)
            with _adding(volume, top, path, image) as directory:
                offset = _map(volume, image)
                entries, cloned, written = _make(
                    image, task, directory, virtual, offset, lock
                )
                commit_transaction(Path(f"/proc/self/fd/{directory}"))
        data = None if image.new_data is None else volume.trees / image.root
        return AddedTree(mount / path, entries, cloned, written, data)


def _checked(volume: VolumeDirectory, top: int, path: str) -> str:
    """Return a path beneath the volume without what says nothing. Raises UsageError."""
    found = path_beneath(path)
    if found is None:
        raise UsageError(
            f"path {path!r} is not one in the volume",
            hint="it is relative to the volume's top directory, and not that itself",
        )
    if exists_beneath(top, found):
        raise UsageError(
            f"there is a {found!r} in volume {volume.name!r}",
            hint="choose another path, or remove what is there",
        )
    return found


def _map(volume: VolumeDirectory, image: _Image) -> int:
    """Map the data object, unless that was done before; return where it is."""
    if image.source is None:
        return 0
    added = devices.device_map(volume.name).add(
        [image.source], [content.Addition(source=0)], names=[image.what]
    )
    return added[0].offset


@contextmanager
def _adding(
    volume: VolumeDirectory, top: int, path: str, image: _Image | None
) -> Iterator[int]:
    """Yield a descriptor of a new subvolume, closed to all others, which gets its path
    when the block ends without an error. Else nothing is left of it."""
    parent, _, name = path.rpartition("/")
    above = [parent[:at] for at, char in enumerate(f"{parent}/") if char == "/"]
    half = HalfTree(
        path=os.path.join(parent, _PREFIX + os.urandom(8).hex()),
        directories=[x for x in above if x and not exists_beneath(top, x)],
        data=(
            image.root
            if image and image.new_data and not (volume.trees / image.root).exists()
            else None
        ),
    )
    with ExitStack() as on_failure:
        # Recorded before anything appears, so that what is half-made is known.
        on_failure.push(undoing(lambda: _remove_half(volume, top)))
        volume.write_half_tree(half)
        with place_beneath(top, half.path, made=lambda path: None) as (
            directory,
            temporary,
        ):
            subvolume = create_subvolume(Path(f"/proc/self/fd/{directory}"), temporary)
            with opened_beneath(directory, temporary) as fd:
                number = _check_new(volume, fd, subvolume)
                volume.write_half_tree(replace(half, subvolume=number))
                os.fchmod(fd, 0o700)
                # Clones of virtual data have no checksums, and files inherit that.
                add_attributes(fd, NO_COW)
                if half.data is not None and image and image.new_data is not None:
                    sync(image.new_data)
                    os.rename(image.new_data, volume.trees / half.data)
                    sync(volume.trees)
                yield fd
            try:
                rename_beneath(directory, temporary, name)
            except FileExistsError as error:
                raise UsageError(f"another program has just made {path!r}") from error
            with deferred():
                on_failure.pop_all()
                # All is on disk before it counts as made.
                commit_transaction(Path(f"/proc/self/fd/{top}"))
                volume.forget_half_tree()


def _check_new(volume: VolumeDirectory, fd: int, path: Path) -> int:
    """Return the number of a subvolume that was just made and opened. Raises
    BtrfsUblkError for anything else: the owner of the parent directory may have put it
    there."""
    opened, status = Path(f"/proc/self/fd/{fd}"), os.fstat(fd)
    if (
        not is_subvolume(fd)
        or status.st_uid != os.geteuid()
        or filesystem_uuid(opened) != volume.fsid()
        or os.listdir(fd)
    ):
        raise BtrfsUblkError(
            f"{path} is not the empty subvolume that was made there",
            hint="another program changes that directory: choose another path",
        )
    return subvolume_id(opened)


def _make(
    image: _Image,
    task: Task,
    directory: int = -1,
    virtual: Path | None = None,
    offset: int = 0,
    lock: Lock | None = None,
) -> tuple[int, int, int]:
    """Have the helper make the tree in an open directory, or only see whether it could.
    Returns the numbers of entries, of bytes cloned, and of bytes written."""
    argv: list[str | Path] = [helper_path(READIMAGE), "make", str(image.subvolume)]
    argv += [image.seed, str(image.data_bytes)]
    with ExitStack() as opened:
        fds = []
        if virtual is not None and lock is not None:
            data = opened.enter_context(open(virtual, "rb", buffering=0))
            argv += [str(directory), str(data.fileno()), str(offset)]
            # NB: with the lock, so that the next command waits for the helper's end.
            fds = [directory, data.fileno(), lock.fileno()]
        child = opened.enter_context(spawn(argv, pipe_stdout=True, keep_open_fds=fds))
        assert child.stdout is not None
        done, numbers = 0, [0, 0, 0]
        for line in child.stdout:
            numbers = [int(word) for word in line.split()]
            task.advance(numbers[0] - done)
            done = numbers[0]
        if child.wait(_TIMEOUT_S) != 0:
            words = child.stderr_tail().strip()
            message, _, hint = words.partition("\n  hint: ")
            message = message.partition(": error: ")[2] or child.failure("failed")
            raise BtrfsUblkError(message, hint=hint or None)
    entries, cloned_bytes, written_bytes = numbers
    return entries, cloned_bytes, written_bytes


def remove_half_tree(volume: VolumeDirectory, top: Path) -> None:
    """Remove what a killed command has left in a mounted volume, whose lock the caller
    has. What cannot be removed causes a warning: nobody waits for it."""
    try:
        if volume.half_tree() is not None:
            with opened_top(volume, top) as fd:
                _remove_half(volume, fd)
    except (BtrfsUblkError, OSError) as error:
        log.warning(
            "a tree that a killed command was adding to volume %s stays: %s",
            volume.name,
            error,
        )


def _remove_half(volume: VolumeDirectory, top: int) -> None:
    half = volume.half_tree()
    if half is None:
        return
    # NB: the name is a random one of ours. What is not there has not begun, or got its
    # path, and is whole; in both cases, its data object is right.
    mount, number = Path(f"/proc/self/fd/{top}"), half.subvolume
    if number is None:  # Nothing is in it, and its data object is not in place yet.
        with suppress(OSError, UsageError), opened_beneath(top, half.path) as fd:
            if is_subvolume(fd):
                number = subvolume_id(Path(f"/proc/self/fd/{fd}"))
    # Others may have moved the directory that it is in, so its path does not matter.
    name = os.fsencode(os.path.basename(half.path))
    if number is not None and subvolume_name(mount, number) == name:
        if half.data is not None:
            (volume.trees / half.data).unlink(missing_ok=True)
        delete_subvolume_number(mount, number)
        volume.forget_made_tree(number)
        log.debug("removed the half-made tree %s", half.path)
    remove_made(top, [(x, os.rmdir) for x in half.directories])
    volume.forget_half_tree()
