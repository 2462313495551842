"""Trees of files that are hard to keep as they are, and descriptions of trees."""

import hashlib
import os
import socket
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


KIB = 1024
TIB = 1 << 40
#: Before 1970, and after 2106, when 32 bits are used up.
EARLY_NS = -123456789_987654321
LATE_NS = 5_000_000_000_123456789


def acl(*entries: tuple[int, int, int]) -> bytes:
    """An attribute's value: tag, permissions and id of each entry, in order."""
    packed = [struct.pack("<HHI", *entry) for entry in entries]
    return struct.pack("<I", 2) + b"".join(packed)


NONE = 0xFFFFFFFF
ACCESS_ACL = acl(
    (1, 6, NONE),
    (2, 4, 1000),
    (2, 7, 100000),
    (4, 4, NONE),
    (16, 6, NONE),
    (32, 0, NONE),
)
DEFAULT_ACL = acl((1, 7, NONE), (4, 5, NONE), (8, 7, 44), (16, 7, NONE), (32, 5, NONE))
#: All for user 1000, in what is made below.
GRANTING_ACL = acl(
    (1, 7, NONE), (2, 7, 1000), (4, 5, NONE), (16, 7, NONE), (32, 0, NONE)
)
#: cap_net_bind_service=ep, version 2
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)


def _deep(top: Path) -> None:
    """A path of nearly 4,000 bytes below the top, and more than 400 levels."""
    fd = os.open(top, os.O_RDONLY)
    for name in (*(["d" * 200] * 16), *(["e"] * 350)):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    with os.fdopen(os.open("end", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "w") as file:
        file.write("deep")
    os.close(fd)


def _contents(top: Path) -> None:
    for size in (0, 1, 511, 512, 513, 2048, 2049, 4095, 4096, 4097, 131072, 131073):
        (top / f"size-{size}").write_bytes(bytes(i * 7 & 255 for i in range(size)))
    (top / "random").write_bytes(os.urandom(300 * KIB))
    with (top / "holes").open("wb") as file:
        for at in (0, 64 * KIB, 65 * KIB, 3000 * KIB + 77):
            file.seek(at)
            file.write(b"data" * 500)
        file.truncate(5000 * KIB + 1)
    with (top / "sparse-8T").open("wb") as file:
        file.truncate(8 * TIB)
        file.seek(5 * TIB)
        file.write(b"in the middle")
    with (top / "all-hole").open("wb") as file:
        file.truncate(1 << 20)


def _special(top: Path) -> None:
    (top / "link").symlink_to("../somewhere/else")
    (top / "long-link").symlink_to("x" * 4000)
    os.symlink(b"\xff\xfe\x80", os.fsencode(top / "odd-link"))
    os.mkfifo(top / "fifo", 0o620)
    os.mknod(top / "character", 0o20640, os.makedev(4, 65))
    os.mknod(top / "block", 0o60600, os.makedev(4095, 1048575))
    with socket.socket(socket.AF_UNIX) as listener:
        fd = os.open(top, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{fd}/socket")
        os.close(fd)
    (top / "suid").write_bytes(b"#!")
    os.chown(top / "suid", 4000000000, 65537)
    (top / "suid").chmod(0o6755)
    (top / "sticky").mkdir()
    (top / "sticky").chmod(0o3777)
    (top / "nothing-allowed").write_bytes(b"secret")
    (top / "nothing-allowed").chmod(0)


def _names(top: Path) -> None:
    directory = os.fsencode(top)
    for name in (
        *(b"n" * 255, b"\xff\xfe not UTF-8 \x80", "ünïcode \N{SNOWMAN}".encode()),
        *(b"new\nline", b" ", b"*", b"-rf", b"...", b".hidden", b"a\\b", b"\x01\x7f"),
        b"\xc3\xbc" * 127 + b"!",
        *(b".wh.not-a-whiteout", b".wh..wh..opq"),
    ):
        with open(os.path.join(directory, name), "wb") as file:
            file.write(name)
    # These two have the same hash in directories of btrfs (crc32c).
    for name in (b"bozamcidft", b"oxchojupsn"):
        Path(os.fsdecode(os.path.join(directory, name))).touch()


def _attributes(top: Path) -> None:
    many = top / "64-KiB-of-attributes"
    many.write_bytes(b"x")
    for number in range(16):
        os.setxattr(many, f"trusted.{number}", os.urandom(4000))
    os.setxattr(many, "trusted." + "n" * 247, b"")
    os.setxattr(many, "trusted.zeros", bytes(100))
    (top / "directory").mkdir()
    os.setxattr(top / "directory", "trusted.of.directory", b"\0\xff")
    (top / "to-nowhere").symlink_to("nowhere")
    os.setxattr(top / "to-nowhere", "trusted.link", b"1", follow_symlinks=False)
    os.mkfifo(top / "fifo")
    os.setxattr(top / "fifo", "trusted.fifo", b"2")
    (top / "capable").write_bytes(b"\x7fELF")
    (top / "capable").chmod(0o755)
    os.setxattr(top / "capable", "security.capability", CAPABILITY)
    (top / "access-acl").write_bytes(b"acl")
    os.setxattr(top / "access-acl", "system.posix_acl_access", ACCESS_ACL)
    (top / "default-acl").mkdir()
    os.setxattr(top / "default-acl", "system.posix_acl_default", DEFAULT_ACL)


def make(top: Path, *, entries: int = 1000, links: int = 1000) -> Path:
    """Takes root. Of names in one directory and hard links to one file, as many as are
    asked for."""
    for part in (_deep, _contents, _special, _names, _attributes):
        directory = top / part.__name__[1:]
        directory.mkdir(parents=True)
        part(directory)
    (top / "many").mkdir()
    for number in range(entries):
        (top / "many" / f"entry {number:06}").touch()
    (top / "links" / "below").mkdir(parents=True)
    (top / "links" / "first").write_bytes(b"linked")
    for number in range(links - 1):
        name = f"below/{number}" if number % 2 else f"{number}"
        os.link(top / "links" / "first", top / "links" / name)
    os.link(top / "special" / "fifo", top / "links" / "fifo")
    os.link(top / "special" / "link", top / "links" / "symbolic", follow_symlinks=False)
    for name, time_ns in (("early", EARLY_NS), ("late", LATE_NS), ("zero", 0)):
        (top / name).mkdir()
        os.utime(top / name, ns=(time_ns, time_ns))
    os.utime(top / "contents" / "size-1", ns=(-1_500000000, -1_500000000))
    return top
