"""Committing forks: an ordinary image of what a fork of a sealed image shows."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import run, spawn
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import (
    create_snapshot,
    create_subvolume,
    is_subvolume,
    nested_subvolumes,
    set_read_only,
    subvolume_uuids,
)
from btrfs_ublk.kernel.new_file import new_file
from btrfs_ublk.kernel.send import StreamHead, changed_paths, read_head, write_changes
from btrfs_ublk.volume.definition import image_access
from btrfs_ublk.volume.forks import (
    COMMITS_DIRECTORY,
    LAYERS_DIRECTORY,
    LIGHT,
    OVERLAY,
    OVERLAYS_DIRECTORY,
    UPPER,
    Fork,
    adopt_fork,
    delete_or_warn,
    find_fork,
    find_place,
    is_light,
    without_lefts,
)
from btrfs_ublk.volume.image import UpImage, up_with_image

if TYPE_CHECKING:
    from btrfs_ublk.image.access import RegistryAccess
    from btrfs_ublk.image.commit import CommittedImage
    from btrfs_ublk.image.documents import Compression
    from btrfs_ublk.image.layer import Changes
    from btrfs_ublk.image.reference import Name

#: A bound for what would otherwise wait for ever.
_TIMEOUT_S = 86400.0


def commit_fork(
    name: str,
    fork: str,
    target: Name,
    *,
    access: RegistryAccess | None = None,
    compression: Compression = "gzip",
    base: StrPath | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> tuple[CommittedImage, int]:
    """Make an ordinary image of a fork: the layers of the volume's image, and one of
    what the fork has changed. ``access`` is to the registry of ``target``; None: that
    of the volume's image. Returns the image, and how many sockets were left out.

    Raises UsageError for a fork that cannot be a layer, and what commit_image() raises.
    """
    from btrfs_ublk.image.commit import commit_image, find_base
    from btrfs_ublk.image.layer import write_layer
    from btrfs_ublk.image.reference import parse_name

    with up_with_image(name, base) as up:
        found = find_fork(up.mount, fork)
        if found.layer is None or found.layer.name not in up.layers:
            raise _unknown_layer(fork)
        chain_ids = up.layers[: up.layers.index(found.layer.name) + 1]
        base_access = image_access(up.definition)
    say("look the image up")
    below = find_base(parse_name(up.name), base_access, chain_ids)
    with _moment(name, found, up.mount, base) as moment:
        say("look what has changed")
        try:
            changes, tree = _changes(found, moment)
        except OSError as error:
            raise _unread(fork, error) from error
        sockets = 0

        def write(out: IO[bytes]) -> None:
            nonlocal sockets
            sockets = write_layer(tree, changes, out)

        image = commit_image(
            below,
            write,
            target,
            access or base_access,
            base_access=base_access,
            compression=compression,
            say=say,
        )
        return image, sockets


def write_delta(
    name: str, fork: str, path: Path, *, base: StrPath | None = None
) -> int:
    """Write what a fork has changed to a new file: a stream, from which apply_delta()
    makes an equal fork in another volume of the image. No data of the image are read.
    Returns its size. Raises UsageError, BtrfsUblkError."""
    with up_with_image(name, base) as up:
        found = find_fork(up.mount, fork)
    layer = found.layer
    if layer is None or not is_subvolume(layer):
        raise _unknown_layer(fork)
    if nested_subvolumes(
        up.mount / OVERLAYS_DIRECTORY / fork if found.mode == "overlay" else found.path
    ):
        raise UsageError(
            f"fork {fork!r} has subvolumes of its own, which a delta does not have",
            hint="remove them, or copy them to directories",
        )
    with _moment(name, found, up.mount, base) as moment, ExitStack() as stack:
        if found.mode == "overlay" and is_light(moment):
            whole = _with_layer(name, moment, layer, up.mount, base)
            moment = stack.enter_context(whole)
        try:
            with new_file(path, mode=0o600, synced=True) as file:
                write_changes(moment, layer, file.fileno())
                return os.fstat(file.fileno()).st_size
        except FileExistsError as error:
            raise UsageError(f"{path} exists", hint="name another file") from error
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot write the delta of fork {fork!r} to {path}: {error.strerror}"
            ) from error


def diff_fork(
    name: str, fork: str, *, base: StrPath | None = None
) -> list[tuple[str, Path]]:
    """Return what a fork has changed at this moment, by path: each path with "added",
    "changed" or "removed". No data are read. A directory has changed if its mode or
    owner has. Raises UsageError, BtrfsUblkError."""
    with up_with_image(name, base) as up:
        found = find_fork(up.mount, fork)
    if found.layer is None:
        raise _unknown_layer(fork)
    with _moment(name, found, up.mount, base) as moment:
        try:
            changes, tree = _changes(found, moment)
            told = _told(changes, tree, found.layer)
        except OSError as error:
            raise _unread(fork, error) from error
    return [(told[path], Path("/", os.fsdecode(path))) for path in sorted(told)]


def _told(changes: Changes, tree: Path, layer: Path) -> dict[bytes, str]:
    top, told = os.fsencode(tree), {path: "removed" for path in changes.removed}
    there = _looking_into(os.fsencode(layer))
    opaque = set(changes.opaque)
    for path in sorted({*changes.opaque, *changes.taken}):
        # What overlayfs makes below a new directory hides as much, without a mark.
        if path not in opaque and os.path.dirname(path) not in opaque:
            continue
        then = there(path)
        if then is None or not stat.S_ISDIR(then.st_mode):
            continue
        if path in opaque or stat.S_ISDIR(os.lstat(os.path.join(top, path)).st_mode):
            opaque.add(path)
            for name in os.listdir(os.path.join(os.fsencode(layer), path)):
                told[os.path.join(path, name)] = "removed"
    for path in changes.taken:
        now, then = os.lstat(os.path.join(top, path)), there(path)
        if then is None:
            told[path] = "added"
            continue
        fields = ("st_mode", "st_uid", "st_gid")
        same = all(getattr(now, x) == getattr(then, x) for x in fields)
        if same and stat.S_ISDIR(now.st_mode):
            told.pop(path, None)
        else:
            told[path] = "changed"
    return told


def _looking_into(top: bytes) -> Callable[[bytes], os.stat_result | None]:
    """Return a function that finds a path below a directory, and follows no link."""

    @cache
    def there(path: bytes) -> os.stat_result | None:
        parent = os.path.dirname(path)
        above = there(parent) if parent else None
        if parent and (above is None or not stat.S_ISDIR(above.st_mode)):
            return None
        try:
            return os.lstat(os.path.join(top, path))
        except FileNotFoundError:
            return None

    return there


def _unknown_layer(fork: str) -> UsageError:
    return UsageError(
        f"which layer fork {fork!r} was made of is not known",
        hint="it is a snapshot of something that is no layer, or is gone",
    )


def _unread(fork: str, error: OSError) -> BtrfsUblkError:
    return BtrfsUblkError(f"cannot read fork {fork!r}: {error.strerror}")


def apply_delta(
    name: str, path: Path, fork: str, *, base: StrPath | None = None
) -> Path:
    """Make the fork that a delta is of in another volume of the same image, which is
    up; return its path. Raises UsageError for a delta of another image and a name that
    is taken, BtrfsUblkError for one that is damaged. Nothing is left then."""
    try:
        with open(path, "rb") as file:
            head = read_head(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (EOFError, ValueError) as error:
        raise UsageError(
            f"{path} is no delta: {error}",
            hint="one is made by: btrfs-ublk image commit NAME FORK --delta FILE",
        ) from error
    with _receiving(name, base, path, head, fork) as (up, layer, work):
        place = work / LAYERS_DIRECTORY / layer.name
        place.mkdir(parents=True)
        _receive(path, layer, place, work)
        names = sorted(x.name for x in work.iterdir() if x.name != LAYERS_DIRECTORY)
        if len(names) != 1 or not is_subvolume(work / names[0]):
            raise UsageError(
                f"{path} makes {names or 'nothing'}, and no single subvolume",
                hint="it was not made by `image commit --delta`: do not trust it",
            )
        with up_with_image(name, base):
            return adopt_fork(up.mount, fork, work / names[0], layer)


@contextmanager
def _receiving(
    name: str, base: StrPath | None, path: Path, head: StreamHead, fork: str
) -> Iterator[tuple[UpImage, Path, Path]]:
    """Yield the volume, the layer that a delta is of, and a new subvolume to receive it
    in, which is removed at the end, as those of _moment() are."""
    with up_with_image(name, base) as up:
        layers = [up.mount / LAYERS_DIRECTORY / one for one in up.layers]
        found = [x for x in layers if subvolume_uuids(x)[0] == head.parent]
        if not found:
            raise UsageError(
                f"{path} is a delta of subvolume {head.parent}, and volume {name!r} "
                f"has none of its layers with that UUID: it is of {up.name}",
                hint="apply it in a volume of the very image that it was made in",
            )
        # Also where a command that was killed afterwards has made the fork.
        without_lefts(up.mount)
        find_place(up.mount, fork, is_overlay=False)
    with _temporary(name, up.mount, base, create_subvolume) as work:
        yield up, found[0], work


def _receive(path: Path, layer: Path, place: Path, work: Path) -> None:
    """Run ``btrfs receive``. NB: it does what the stream says, as root. So its root is
    a directory that has nothing but the layer, where the file system has it, too. The
    mount is in a namespace of its own, which ends with it."""
    script = 'mount --bind "$1" "$2" && exec btrfs --quiet receive -e -C "$3"'
    argv: list[str | Path] = ["unshare", "--mount", "--propagation", "private", "--"]
    argv += ["sh", "-c", script, "sh", layer, place, work]
    with open(path, "rb") as stream, spawn(argv, stdin=stream) as child:
        if child.wait(_TIMEOUT_S) != 0:
            lines = child.stderr_tail().splitlines()
            said = "; ".join(
                x.removeprefix("ERROR: ") for x in lines if not x.startswith("Chroot")
            )
            raise BtrfsUblkError(
                f"{path} cannot be applied: {said or child.failure('failed')}",
                hint="is it complete? nothing is left of it",
            )


def _changes(fork: Fork, moment: Path) -> tuple[Changes, Path]:
    """Return what has changed, and the directory that has it."""
    from btrfs_ublk.image.layer import changes_between, changes_of_overlay

    if fork.mode == "overlay":
        upper = moment / OVERLAY / UPPER
        return changes_of_overlay(upper), upper
    assert fork.layer is not None
    if nested_subvolumes(fork.path):
        raise UsageError(
            f"fork {fork.name!r} has subvolumes of its own, which a layer cannot hold",
            hint="remove them, or copy them to directories; see: btrfs subvolume list "
            f"-o {fork.path}",
        )
    found = changed_paths(moment, fork.layer)
    return (changes_between(moment, fork.layer, found.paths, found.attributes), moment)


@contextmanager
def _moment(name: str, fork: Fork, mount: Path, base: StrPath | None) -> Iterator[Path]:
    """Yield a read-only snapshot of all that a fork has; it is removed at the end. What
    killed commands left is removed first. The directory of such snapshots stays:
    another command may be about to make one there."""
    source = (
        fork.path if fork.mode == "snapshot" else mount / OVERLAYS_DIRECTORY / fork.name
    )

    def make(directory: Path, own: str) -> Path:
        return create_snapshot(source, directory, own, read_only=True)

    with _temporary(name, mount, base, make) as path:
        yield path


@contextmanager
def _with_layer(
    name: str, moment: Path, layer: Path, mount: Path, base: StrPath | None
) -> Iterator[Path]:
    """Yield a subvolume that is of a layer, as a delta is of one, and has the overlay
    of a moment in it: clones of its files."""

    def make(directory: Path, own: str) -> Path:
        return create_snapshot(layer, directory, own)

    with _temporary(name, mount, base, make) as path:
        words = ["cp", "--archive", "--preserve=xattr", "--reflink=auto"]
        run([*words, moment / OVERLAY, path], timeout_s=_TIMEOUT_S)
        os.removexattr(path / OVERLAY, LIGHT)
        set_read_only(path)
        yield path


@contextmanager
def _temporary(
    name: str, mount: Path, base: StrPath | None, make: Callable[[Path, str], object]
) -> Iterator[Path]:
    """Yield a subvolume that lasts as long as the block."""
    path, lock = mount / COMMITS_DIRECTORY / os.urandom(8).hex(), -1
    try:
        with deferred(), up_with_image(name, base):
            make(without_lefts(mount), path.name)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        with deferred():
            if os.path.lexists(path):
                delete_or_warn(path)
            if lock >= 0:
                os.close(lock)
