"""The layer of an OCI image that makes a changed tree of an unchanged one (image
specification, layer.md)."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO

from btrfs_ublk.errors import BtrfsUblkError, UsageError

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_NS_PER_S = 1_000_000_000
#: An attribute of overlayfs: "y" on a directory that hides the one below.
_OPAQUE_ATTRIBUTE = "trusted.overlay.opaque"
#: These are of this machine, or say how this file system keeps the file.
_LEFT_OUT = (
    *("security.selinux", "security.evm", "security.ima"),
    *("trusted.overlay.", "btrfs."),
)
_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFSOCK: tarfile.REGTYPE,
}


@dataclass
class Changes:
    """What a layer has, as paths relative to the top: what is taken as it is in the
    changed tree, what is removed, and which directories hide what was there."""

    taken: set[bytes] = field(default_factory=set)
    removed: set[bytes] = field(default_factory=set)
    opaque: set[bytes] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.taken or self.removed)


def changes_between(
    tree: Path, base: Path, touched: Iterable[bytes], attributes: Iterable[bytes] = ()
) -> Changes:
    """Return what has changed from the subvolume ``base`` to its snapshot ``tree``,
    where it differs at most in the paths ``touched``, and in attributes of others.
    Raises OSError."""
    top, below = os.fsencode(tree), os.fsencode(base)
    found = Changes()
    linked: set[int] = set()

    def take(path: bytes, status: os.stat_result) -> None:
        found.taken.add(path)
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            linked.add(status.st_ino)

    def take_tree(path: bytes, status: os.stat_result) -> None:
        take(path, status)
        if stat.S_ISDIR(status.st_mode):
            for entry in _walk(top, path):
                take(*entry)

    def look_at(path: bytes, *, of_attributes: bool = False) -> None:
        parts = path.split(b"/")
        for count in range(1, len(parts) + 1):
            here = b"/".join(parts[:count])
            now, then = _status(top, here), _status(below, here)
            if now is None:
                if then is not None:
                    found.removed.add(here)
                return
            if then is None or then.st_ino != now.st_ino:
                if here not in found.taken:
                    take_tree(here, now)
                if then is not None and _are_directories(now, then):
                    found.opaque.add(here)
                return
            if count == len(parts):
                # NB: who reads a file changes the time of its last access.
                if not of_attributes or _differ(now, then):
                    take(here, now)
            elif not _are_directories(now, then):
                return  # The path was one of others, for a while.

    for path in touched:
        if path:
            look_at(path)
    for path in attributes:
        if path:
            look_at(path, of_attributes=True)
    if linked:
        # All names of a file must be in one layer.
        found.taken.update(
            path for path, status in _walk(top) if status.st_ino in linked
        )
    return found


def changes_of_overlay(upper: Path) -> Changes:
    """Return what the upper directory of an overlay says, whose whole files are under
    their own names. Raises OSError."""
    top, found = os.fsencode(upper), Changes()
    for path, status in _walk(top):
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            found.removed.add(path)
            continue
        found.taken.add(path)
        if stat.S_ISDIR(status.st_mode):
            with suppress(OSError):
                where = os.path.join(top, path)
                if os.getxattr(where, _OPAQUE_ATTRIBUTE) == b"y":
                    found.opaque.add(path)
    return found


def _differ(one: os.stat_result, other: os.stat_result) -> bool:
    fields = ("st_mode", "st_uid", "st_gid", "st_mtime_ns")
    sizes = stat.S_ISREG(one.st_mode) and one.st_size != other.st_size
    return sizes or any(getattr(one, x) != getattr(other, x) for x in fields)


def _are_directories(*statuses: os.stat_result) -> bool:
    return all(stat.S_ISDIR(status.st_mode) for status in statuses)


def _status(top: bytes, path: bytes) -> os.stat_result | None:
    try:
        return os.lstat(os.path.join(top, path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _walk(top: bytes, path: bytes = b"") -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield all that is below a directory, each with its path below ``top``."""
    pending = [path]
    while pending:
        directory = pending.pop()
        for name in os.listdir(os.path.join(top, directory)):
            below = os.path.join(directory, name)
            status = os.lstat(os.path.join(top, below))
            yield below, status
            if stat.S_ISDIR(status.st_mode):
                pending.append(below)


def write_layer(tree: Path, changes: Changes, out: IO[bytes]) -> int:
    """Write the layer as a tar; return how many sockets were left out. The same tree
    makes the same bytes. Raises UsageError for a name that layers cannot hold, and
    OSError."""
    top = os.fsencode(tree)
    for path in sorted(changes.taken):
        if os.path.basename(path).startswith(_WHITEOUT):
            raise UsageError(
                f"{os.fsdecode(b'/' + path)!r} cannot be in a layer: there, names that "
                "begin with .wh. say what is removed",
                hint="rename it",
            )
    gone = {os.path.join(path, _OPAQUE) for path in changes.opaque}
    for path in changes.removed:
        directory, name = os.path.split(path)
        gone.add(os.path.join(directory, _WHITEOUT + name))
    taken = set(changes.taken)
    for path in changes.taken | changes.removed:
        # Who unpacks each layer on its own would make missing directories anew.
        while path := os.path.dirname(path):
            taken.add(path)
    sockets = 0
    links: dict[int, str] = {}
    with tarfile.open(
        fileobj=out,
        mode="w|",
        format=tarfile.PAX_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as tar:
        tar.addfile(_member(top, b"", os.lstat(top)))
        # What is removed comes first in its directory, as some apply layers in order.
        for path in sorted(
            taken | gone,
            key=lambda path: [(part not in gone, part) for part in _prefixes(path)],
        ):
            if path in gone:
                tar.addfile(tarfile.TarInfo(os.fsdecode(path)))
                continue
            status = os.lstat(os.path.join(top, path))
            if stat.S_ISSOCK(status.st_mode):
                sockets += 1
            else:
                _add(tar, top, path, status, links)
    return sockets


def _prefixes(path: bytes) -> Iterator[bytes]:
    parts = path.split(b"/")
    for count in range(1, len(parts) + 1):
        yield b"/".join(parts[:count])


def _add(
    tar: tarfile.TarFile,
    top: bytes,
    path: bytes,
    status: os.stat_result,
    links: dict[int, str],
) -> None:
    member = _member(top, path, status)
    if status.st_nlink > 1 and not member.isdir():
        first = links.setdefault(status.st_ino, member.name)
        if first != member.name:
            member.type, member.linkname, member.size = tarfile.LNKTYPE, first, 0
            member.pax_headers = {}
    if not member.isreg():
        tar.addfile(member)
        return
    with _Reading(os.path.join(top, path)) as file:
        tar.addfile(member, file)


class _Reading(FileIO):
    """A file to read, whose errors say that they are of reading."""

    def __init__(self, path: bytes) -> None:
        super().__init__(path, opener=_open)

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return super().read(size)
        except OSError as error:
            raise _unread(self.name, error) from error


def _open(path: str, _flags: int) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _unread(path, error) from error


def _unread(path: object, error: OSError) -> BtrfsUblkError:
    name = os.fsdecode(path) if isinstance(path, bytes) else path
    return BtrfsUblkError(f"cannot read {name}: {error.strerror}")


def _member(top: bytes, path: bytes, status: os.stat_result) -> tarfile.TarInfo:
    where = os.path.join(top, path)
    member = tarfile.TarInfo(os.fsdecode(path or b"."))
    member.mode = stat.S_IMODE(status.st_mode)
    member.uid, member.gid = status.st_uid, status.st_gid
    member.type = _TYPES[stat.S_IFMT(status.st_mode)]
    if member.isreg():
        member.size = status.st_size
    elif member.issym():
        member.linkname = os.fsdecode(os.readlink(where))
    elif member.ischr() or member.isblk():
        member.devmajor = os.major(status.st_rdev)
        member.devminor = os.minor(status.st_rdev)
    member.mtime, part_ns = divmod(status.st_mtime_ns, _NS_PER_S)
    records = {}
    if part_ns or member.mtime < 0:
        records["mtime"] = _time(status.st_mtime_ns)
    for name in sorted(os.listxattr(where, follow_symlinks=False)):
        if not name.startswith(_LEFT_OUT):
            value = os.getxattr(where, name, follow_symlinks=False)
            records[f"SCHILY.xattr.{name}"] = os.fsdecode(value)
    member.pax_headers = records
    return member


def _time(time_ns: int) -> str:
    seconds, part_ns = divmod(abs(time_ns), _NS_PER_S)
    text = f"{'-' * (time_ns < 0)}{seconds}"
    return text + f".{part_ns:09}".rstrip("0") if part_ns else text
