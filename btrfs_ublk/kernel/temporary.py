"""Make a temporary directory that ``gc`` can recognise by its name."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.kernel.mountinfo import mounts_at_or_below

_KIND = "tempdir"


@contextmanager
def tempdir(
    *,
    prefix: str = "btrfs-ublk-",
    parent: StrPath | None = None,
    ledger: Ledger | None = None,
) -> Iterator[Path]:
    """Make a directory of mode 0700; remove it, and its content, after the block.

    ``parent`` defaults to $TMPDIR or /tmp. Raises LeftoverError, and removes nothing,
    while something is mounted in it, or a loop device is on a file in it.
    """
    ledger = ledger or process_ledger()
    # NB: do not use tempfile.gettempdir(): it writes files, which a kill leaves behind.
    if parent is None:
        parent = os.environ.get("TMPDIR") or "/tmp"
    where = Path(parent).resolve()
    with ledger.holding(_KIND, parent=str(where), prefix=prefix) as entry:
        path = _path(entry)
        with deferred():
            path.mkdir(mode=0o700)
            status = path.stat()
            ledger.amend(entry, device=status.st_dev, inode=status.st_ino)
        yield path


def _path(entry: Entry) -> Path:
    # The random tag in its name shows that it is ours, even if no inode was noted.
    return Path(entry.details["parent"]) / f"{entry.details['prefix']}{entry.tag}"


@remover(_KIND, survives_reboot=True, place=lambda entry: str(_path(entry)))
def _remove(entry: Entry) -> bool:
    path = _path(entry)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise LeftoverError(
            f"{path} was not made by this program: another one put it there"
        )
    # NB: compare only the inode: a file system's device number may change at a boot.
    if entry.details.get("inode", status.st_ino) != status.st_ino:
        raise LeftoverError(f"{path} was replaced by another directory")
    mounts = mounts_at_or_below(path)
    if mounts:
        raise LeftoverError(
            f"{path} is not removed: {mounts[-1].target} is still mounted in it",
            hint=f"umount {mounts[-1].target}",
        )
    loops = loops_below(path)
    if loops:
        device, backing_file = loops[0]
        raise LeftoverError(
            f"{path} is not removed: {device} is on {backing_file}",
            hint=f"unmount what is on it, then: losetup -d {device}",
        )
    remove_tree(path)
    return True


def loops_below(
    directory: Path, *, among: Iterable[str] | None = None
) -> list[tuple[Path, Path]]:
    """Return all loop devices with a backing file in the directory, and that file; or
    those that are ``among`` names of devices.

    NB: they may be mounted elsewhere, even in another mount namespace.
    """
    found = []
    names = ["loop*"] if among is None else among
    block = Path("/sys/block")
    for link in (x for name in names for x in block.glob(f"{name}/loop/backing_file")):
        with suppress(OSError):  # it may be detached while we look
            backing_file = Path(os.fsdecode(link.read_bytes().removesuffix(b"\n")))
            if directory in backing_file.parents:
                found.append((Path("/dev") / link.parent.parent.name, backing_file))
    return sorted(found)


def remove_tree(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory with all that is in it. Raises OSError."""
    with deferred():
        # It imports all kinds of compression, and most commands remove nothing.
        import shutil
    shutil.rmtree(path, ignore_errors=ignore_errors)
