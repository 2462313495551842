"""Committing forks: an ordinary image of what a fork of a sealed image shows."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from btrfs_ublk.base.log import log
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import (
    create_snapshot,
    delete_subvolumes,
    nested_subvolumes,
)
from btrfs_ublk.kernel.send import changed_paths
from btrfs_ublk.volume.forks import (
    COMMITS_DIRECTORY,
    OVERLAY,
    OVERLAYS_DIRECTORY,
    UPPER,
    Fork,
    find_fork,
    make_directory,
)
from btrfs_ublk.volume.image import image_access, up_with_image

if TYPE_CHECKING:
    from btrfs_ublk.image.commit import CommittedImage, Compression
    from btrfs_ublk.image.connection import RegistryAccess
    from btrfs_ublk.image.layer import Changes
    from btrfs_ublk.image.reference import Name


def commit_fork(
    name: str,
    fork: str,
    target: Name,
    *,
    access: RegistryAccess | None = None,
    compression: Compression = "gzip",
    base: StrPath | None = None,
    progress: Callable[[int], object] = lambda count: None,
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
            raise UsageError(
                f"which layer fork {fork!r} was made of is not known",
                hint="it is a snapshot of something that is no layer, or is gone",
            )
        chain_ids = up.layers[: up.layers.index(found.layer.name) + 1]
        base_access = image_access(up.definition)
    say("look the image up")
    below = find_base(parse_name(up.name), base_access, chain_ids)
    with _moment(name, found, up.mount, base) as moment:
        say("look what has changed")
        try:
            changes, tree = _changes(found, moment)
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot read fork {fork!r}: {error.strerror}"
            ) from error
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
            progress=progress,
            say=say,
        )
        return image, sockets


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
    return (
        changes_between(moment, fork.layer, found.paths, found.attributes),
        moment,
    )


@contextmanager
def _moment(name: str, fork: Fork, mount: Path, base: StrPath | None) -> Iterator[Path]:
    """Yield a read-only snapshot of all that a fork has; it is removed at the end. What
    killed commands left is removed first. The directory of such snapshots stays:
    another command may be about to make one there."""
    commits = mount / COMMITS_DIRECTORY
    source = (
        fork.path if fork.mode == "snapshot" else mount / OVERLAYS_DIRECTORY / fork.name
    )
    path, lock = commits / os.urandom(8).hex(), -1
    try:
        with deferred(), up_with_image(name, base):
            make_directory(commits, 0o700)
            for left in commits.iterdir():
                _remove_left(left)
            create_snapshot(source, commits, path.name, read_only=True)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        with deferred():
            if os.path.lexists(path):
                _delete(path)
            if lock >= 0:
                os.close(lock)


def _remove_left(path: Path) -> None:
    """Remove the snapshot of a command that has died: nobody has it locked."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(path)
        finally:
            os.close(fd)


def _delete(path: Path) -> None:
    try:
        delete_subvolumes(path)
    except BtrfsUblkError as error:
        log.warning("%s", error)  # The next command tries again.
