"""A tree with what is rare in trees, for whatever packs or unpacks trees."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

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
