"""What a tree has: names, types, attributes, links and bytes, to be compared."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BLOCK = 4096
_ZEROS = bytes(BLOCK)
_OF_MACHINES = ("btrfs.", "security.selinux", "security.evm", "security.ima")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Node:
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int | None  # of files
    device: tuple[int, int] | None
    target: bytes | None
    xattrs: tuple[tuple[bytes, bytes], ...]
    #: All names of the inode.
    names: tuple[bytes, ...]
    #: SHA-256 over blocks that are not all zeros, with the offset in front of each: so
    #: it is the same with and without holes.
    content: str | None


Tree = dict[bytes, Node]
EMPTY_CONTENT = hashlib.sha256().hexdigest()


def data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges that are no holes, as offset and length."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        if start >= size:
            return
        at = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, at - start


def content_of(path: bytes) -> str:
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        for start, length in data_ranges(fd, os.fstat(fd).st_size):
            at, end = start - start % BLOCK, -(-(start + length) // BLOCK) * BLOCK
            while at < start + length:
                data = os.pread(fd, min(_READ_BYTES, end - at), at)
                for place in range(0, len(data), BLOCK):
                    block = data[place : place + BLOCK].ljust(BLOCK, b"\0")
                    if block != _ZEROS:
                        digest.update(struct.pack("<Q", at + place))
                        digest.update(block)
                at += len(data)
    finally:
        os.close(fd)
    return digest.hexdigest()


def _xattrs(path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    names = sorted(os.fsencode(name) for name in _listed(path))
    return tuple(
        (name, os.getxattr(path, name, follow_symlinks=False)) for name in names
    )


def _listed(path: bytes) -> list[str]:
    """Without those of the file system, or of the machine, where the tree is."""
    return [
        name
        for name in os.listxattr(path, follow_symlinks=False)
        if not name.startswith(_OF_MACHINES)
    ]


def _walk(top: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Paths below the top, and how to get there; the top itself is b"."."""
    waiting = [b"."]
    while waiting:
        name = waiting.pop()
        path = os.path.join(top, name)
        yield name, path
        if stat.S_ISDIR(os.lstat(path).st_mode):
            waiting += [
                (child if name == b"." else name + b"/" + child)
                for child in os.listdir(path)
            ]


def describe(top: Path) -> Tree:
    """Paths must not be longer than the system allows."""
    inodes: dict[tuple[int, int], list[tuple[bytes, bytes]]] = {}
    for name, path in _walk(os.fsencode(top)):
        found = os.lstat(path)
        inodes.setdefault((found.st_dev, found.st_ino), []).append((name, path))
    tree: Tree = {}
    for paths in inodes.values():
        names = tuple(sorted(name for name, _ in paths))
        tree.update(dict.fromkeys(names, _node(paths[0][1], names)))
    return tree


def _node(path: bytes, names: tuple[bytes, ...]) -> Node:
    found = os.lstat(path)
    is_file = stat.S_ISREG(found.st_mode)
    device = None
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        device = os.major(found.st_rdev), os.minor(found.st_rdev)
    return Node(
        mode=found.st_mode,
        uid=found.st_uid,
        gid=found.st_gid,
        mtime_ns=found.st_mtime_ns,
        size=found.st_size if is_file else None,
        device=device,
        target=os.readlink(path) if stat.S_ISLNK(found.st_mode) else None,
        xattrs=_xattrs(path),
        names=names,
        content=content_of(path) if is_file else None,
    )


def differences(one: Tree, other: Tree) -> list[str]:
    """What differs, a line each; empty when the trees are equal."""
    lines = [
        f"{name!r}: only in the first" for name in sorted(one.keys() - other.keys())
    ]
    lines += [
        f"{name!r}: only in the second" for name in sorted(other.keys() - one.keys())
    ]
    compared = set()
    for name in sorted(one.keys() & other.keys()):
        if (id(one[name]), id(other[name])) in compared:
            continue  # another name of the same
        compared.add((id(one[name]), id(other[name])))
        for field in fields(Node):
            left = getattr(one[name], field.name)
            right = getattr(other[name], field.name)
            if left != right:
                lines.append(f"{name!r}: {field.name} is {left!r:.300}, {right!r:.300}")
    return lines


ROOT = 256


def tree_of(model: dict[str, Any]) -> Tree:
    """As `describe` has it."""
    inodes = {inode["inode"]: inode for inode in model["inodes"]}

    def paths(number: int) -> list[bytes]:
        if number == ROOT:
            return [b"."]
        names = []
        for parent, name, _ in inodes[number]["names"]:
            above = path_of(parent)
            prefix = b"" if above == b"." else above + b"/"
            names.append(prefix + bytes.fromhex(name))
        return sorted(names)

    known: dict[int, bytes] = {}

    def path_of(number: int) -> bytes:
        if number not in known:
            (known[number],) = paths(number)
        return known[number]

    tree = {}
    for number in sorted(inodes):
        inode = inodes[number]
        is_file = inode["mode"] >> 12 == 8
        node = Node(
            mode=inode["mode"],
            uid=inode["uid"],
            gid=inode["gid"],
            mtime_ns=inode["mtime_s"] * 10**9 + inode["mtime_ns"],
            size=inode["bytes"] if is_file else None,
            device=tuple(inode["device"]) if "device" in inode else None,
            target=bytes.fromhex(inode["target"]) if "target" in inode else None,
            xattrs=tuple(
                sorted(
                    (bytes.fromhex(name), bytes.fromhex(value))
                    for name, value in inode["xattrs"].items()
                )
            ),
            names=tuple(paths(number)),
            content=(
                inode.get("data", {"sha256": EMPTY_CONTENT})["sha256"]
                if is_file
                else None
            ),
        )
        tree.update(dict.fromkeys(node.names, node))
    return tree


def names(model: dict[str, Any]) -> set[str]:
    return {os.fsdecode(name) for name in tree_of(model)} - {"."}


class Member(tarfile.TarInfo):
    content = b""


def entry(name: str, content: bytes = b"", **changes: object) -> Member:
    header = Member(name)
    header.size = len(content)
    header.mode = 0o644
    for key, value in changes.items():
        setattr(header, key, value)
    header.content = content
    return header


def directory(name: str, **changes: object) -> Member:
    return entry(name, type=tarfile.DIRTYPE, mode=0o755, **changes)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    return entry(name, type=kind, linkname=target)
