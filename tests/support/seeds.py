"""Seeds that tests make and read, and the parts of btrfs' format for it."""

import base64
import hashlib
import io
import json
import os
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from btrfs_ublk.base.helpers import MKSEED, helper_path
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.kernel.btrfs import add_device
from btrfs_ublk.kernel.mount import Mount

KIB, MIB, GIB, TIB, EIB = (1 << shift for shift in (10, 20, 30, 40, 60))
BLOCK = 4096
CHUNK = 255 * TIB
VIRTUAL_START = 512 * GIB
MAX_SIZE = 8 * EIB - 4 * GIB - VIRTUAL_START
NAME = ".btrfs-ublk-virtual-data"
TIMEOUT_S = 30


def mkseed_raw(
    *args: str | bytes | Path,
    program: str | Path | None = None,
    env: dict[str, str] | None = None,
    **popen: Any,
) -> subprocess.CompletedProcess[bytes]:
    base = {k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"}
    return subprocess.run(
        [program or helper_path(MKSEED), *args],
        capture_output=True,
        timeout=TIMEOUT_S,
        env=base | (env or {}),
        **popen,
    )


def mkseed(*args: str | bytes | Path, **keywords: Any) -> dict[str, Any]:
    """Make a seed; what is said about it."""
    done = mkseed_raw(*args, **keywords)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b"" and done.stdout.count(b"\n") == 1
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def btrfs_check(image: Path) -> None:
    done = subprocess.run(
        ["btrfs", "check", image], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    complaints = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if any(word in line.lower() for word in ("warning", "error:", "mismatch"))
        # The price of the stub chunk.
        and "Multiple block group" not in line and "Data: single, raid0" not in line
        # It looks at all devices of the machine, which others may be about to detach.
        and "cannot scan /dev/" not in line
    ]
    assert not complaints, complaints


@contextmanager
def sprout(seed: Path, directory: Path) -> Iterator[tuple[Mount, Path]]:
    """Mount the seed, add a local device, make it writable: the mount, and that
    device's file.
    """
    local = directory / "local.img"
    target = directory / "mount"
    target.mkdir()
    with local.open("wb") as file:
        file.truncate(GIB)
    with (
        loop_device(seed, read_only=True) as seed_loop,
        loop_device(local) as local_loop,
        mounted(
            seed_loop.path, target, read_only=True, added=[local_loop.path]
        ) as mount,
    ):
        add_device(target, local_loop.path)
        mount.remount(options=["rw"])
        yield mount, local


#: Everything that makes two images equal.
IDENTITY = ("--fsid=00112233-4455-6677-8899-aabbccddeeff", "--time=1700000000")


def digest(path: Path) -> str:
    content = hashlib.sha256(str(path.stat().st_size).encode())
    for offset, block in data_bytes(path):
        content.update(offset.to_bytes(8, "little") + block)
    return content.hexdigest()


def assert_refused(
    done: subprocess.CompletedProcess[bytes], status: int, *words: str
) -> None:
    """One error, one hint, the right status, and nothing on stdout."""
    lines = done.stderr.decode(errors="replace").splitlines()
    assert done.returncode == status, lines
    assert done.stdout == b""
    assert lines[0].startswith(f"{MKSEED}: error: "), lines
    assert len(lines) <= 2 and all(line.startswith("  hint: ") for line in lines[1:])
    for word in words:
        assert word in "\n".join(lines), lines


SUPER_OFFSETS = (64 << 10, 64 << 20, 256 << 30)
SUPER_BYTES = 4096

_HEADER = struct.Struct("<32s16sQQ16sQQIB")
_ITEM = struct.Struct("<QBQII")
_POINTER = struct.Struct("<QBQQQ")
_SUPER = struct.Struct("<32s16sQQ8sQQQQQQQQQIIIIIQQQQHBBB98s256s")

ROOT_ITEM = 132


@dataclass(frozen=True)
class Super:
    fsid: bytes
    bytenr: int
    flags: int
    generation: int
    root: int
    chunk_root: int
    total_bytes: int
    bytes_used: int
    node_bytes: int
    compat_ro_flags: int
    incompat_flags: int
    device_uuid: bytes
    label: bytes


@dataclass(frozen=True)
class Item:
    objectid: int
    type: int
    offset: int
    data: bytes

    @property
    def key(self) -> tuple[int, int, int]:
        return self.objectid, self.type, self.offset

    def unpack(self, layout: str, at: int = 0) -> tuple[int, ...]:
        return struct.unpack_from("<" + layout, self.data, at)


class Image:
    """An open image."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.super = self.read_super(SUPER_OFFSETS[0])

    def _read(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        data = self._file.read(length)
        assert len(data) == length, f"the image ends within {length} bytes at {offset}"
        return data

    def read_super(self, offset: int) -> Super:
        fields = _SUPER.unpack_from(self._read(offset, SUPER_BYTES))
        assert fields[4] == b"_BHRfS_M", f"no superblock at {offset}"
        device, label = fields[27:29]
        return Super(
            fsid=fields[1],
            bytenr=fields[2],
            flags=fields[3],
            generation=fields[5],
            root=fields[6],
            chunk_root=fields[7],
            total_bytes=fields[10],
            bytes_used=fields[11],
            node_bytes=fields[15],
            compat_ro_flags=fields[21],
            incompat_flags=fields[22],
            device_uuid=device[66:82],
            label=label.rstrip(b"\0"),
        )

    def items(self, bytenr: int) -> Iterator[Item]:
        """All items of the tree, in order; asserts that they are in order."""
        last: tuple[int, int, int] | None = None
        for item in self._walk(bytenr, None):
            assert last is None or item.key > last, f"{item.key} after {last}"
            last = item.key
            yield item

    def _walk(self, bytenr: int, level: int | None) -> Iterator[Item]:
        block = self._read(bytenr, self.super.node_bytes)
        _, fsid, own_address, _, _, _, _, count, own_level = _HEADER.unpack_from(block)
        assert (fsid, own_address) == (self.super.fsid, bytenr)
        assert level is None or own_level == level
        for slot in range(count):
            if own_level == 0:
                at = _HEADER.size + slot * _ITEM.size
                objectid, type_, offset, start, size = _ITEM.unpack_from(block, at)
                start += _HEADER.size
                yield Item(objectid, type_, offset, block[start : start + size])
            else:
                at = _HEADER.size + slot * _POINTER.size
                child = _POINTER.unpack_from(block, at)[3]
                yield from self._walk(child, own_level - 1)

    def roots(self) -> dict[int, int]:
        """Where each tree starts, by object id."""
        return {
            item.objectid: item.unpack("Q", 176)[0]
            for item in self.items(self.super.root)
            if item.type == ROOT_ITEM
        }


def data_bytes(path: Path) -> Iterator[tuple[int, bytes]]:
    """What of a sparse file is not zero, with its offset, in steps of 4 KiB."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        offset = 0
        while offset < end:
            try:
                offset = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            except OSError:
                return
            hole = os.lseek(file.fileno(), offset, os.SEEK_HOLE)
            while offset < hole:
                block = os.pread(file.fileno(), min(4096, hole - offset), offset)
                if block.strip(b"\0"):
                    yield offset, block
                offset += len(block)


GIB = 1 << 30


def _make_crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _make_crc_table()


def with_checksum(block: bytes | bytearray) -> bytes:
    """A tree block or superblock with its crc32c redone."""
    crc = 0xFFFFFFFF
    for byte in block[32:]:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return struct.pack("<I28x", crc ^ 0xFFFFFFFF) + bytes(block[32:])


OLD_VIRTUAL_BYTES = 64 << 30

#: mkseed --virtual-data-size=64G --metadata-only, as a sparse archive. All of it is
#: metadata: 160 KiB, mostly zeroes.
_ARCHIVE = """
/Td6WFoAAATm1rRGAgAhARwAAAAQz1jM4s//BOldADmZbMgtDMWaRd1IFGm/qli6Vx5yBs+RINsG
Rt6NmR2H5Xb8POw/Xqhg0ZyV6Wo05o6pWbtXuhpgjr3cPw1sNlctDdKhmIltHRp1TcPl1lmoioht
jrpNPJKqq7TJZcbD4UnHh4NqY2o8Ud0XUSTW3+lg8heKM5qKZkhV1/xZ4RhjLti/MpnNRXePQVz6
44YV8i/yOoPbiyUtD4ScGikdPtDUUkMsobgQqa8yIT3P2Gy6UERegTdqrZkG1ob5CEMUbj9CkHim
JRFeCqWwKwXs61QDTZWJ97nd+P+ZGPGwf2OW1mkqvwGFgm0uWuR2x0C4A93Leqk2dJCp6xqzCT73
n7LLuLfujyM02mrZgw/nrjLpc5A3eaYiHhXzeVtPDz1GbXp/vYFGGx4wkA5s7KG4g7PMlVkZEhKh
B5kuKD01Ogozo1Yw/09p6kK8u5HI3lvVZHZonO3Z6a2yP53PNhLRWdJCXS2X/BxNNLn0pl+gPQCp
z/YnxnIZh5FIxeI64u0XErYZEDy5wlH4E4btB3uM2LefiDXHL+stZgV2OMCileU5K9UbO03j8k6/
tNNkPLQPtHgl3HFTIX524OuL4TMklhj2o4YW5jYqI8WaeiS9GlW7q41WIQli3vnbiBIZw4dpfyva
ZKvx4Mb06FmpxCnNwCuLK91u5q63uLcRZVZmNlu/cTeeOrZxQqgs1gAWU1WdgOKqIztjRxepw7qD
CAOyzssZvAjsOCE3FkT43ecPOSK4VLqgaMxRuAfVEm0ba5dN493/BzkxfGCzG/zHKPhJrIaX6E50
t/RgTInQC1kxr7PUEWxpDhnO6dryuu02br0avQWSaH/PnbIF5wKps8r6Kaox3Z3UQh1SaeaMf3Io
Av7zy06qLCQj2PyjMN5RVlfDrh/mmzYx728odAzGZLK+CdFaC02rZyB9+nvLW1GnczPWfLI20veg
aFAnWDtwOmP1iN3BC1b6/xR2fsUTDu0mm6LOay2BwpqRf94sBmS1gWzAU2CtpUtX2w17ul0KB/jh
U8u/aPc4GoDey+I8ew99iWSLaA6T+1v0h5tNamEHPsKWaJTe9Ikg95j8PRTxQdK5S8e1YgdnBuDt
+/2E2/ta8bWQv4rRKHwFM/5a+SYZrMBTKV3J/KYEVw4fnNZY3fbINvuNuKcIt+lfIEaPpkke4uko
1xNr7Cwr4xTb1lei4G+yxBrnsUcRr5VzYc+bPpoiWcPYq1Lv+pRYGs3M9IvJklMC3ueCP77C1wTY
b33Ij3S5JREch3huK7+irhO3NRsUASlUQw+B/Lp/uIKzZii6BWZb69VwTPOwx78vXF10eq5bifpx
Nnq35iqKgIaqsbx6U9uRq4QcD+JB0y2Rnd7wWKHx2qh2GTEcG7pbidQcaCgS4xcsoCvJ07k0hJTA
CgV8+9nwioKN6II5blyi6Ix2Sqs0K8gsxJCBJO3R36/Xa+NnoTfiyNZLtq8M+F7hfg5+5eanoJ+L
M01lKbzBfz+kUTBRve/7Vyj8bM9ltIcTmVkD6nu942N65MwBZTaCeLbPT8WfUFmnxeOXMEXzm8iv
biP+dE6/ZnyKWx7smdqVOsmIEIAf8p5atb+eSZ0XrYCThZM9ipmnnAL/ZmHzGBAglsf25KwKcVSP
bCF+diuTryLcOtDFyccmIjO62A3buNvFQP/tNC4CNlkhrgAAAACIuL14LO/UoQABhQqAoAsAh3tN
ELHEZ/sCAAAAAARZWg==
"""


def unpack_old_seed(directory: Path) -> Path:
    """The image, in a directory on a file system that has large sparse files."""
    archive = io.BytesIO(base64.b64decode(_ARCHIVE))
    with tarfile.open(fileobj=archive, mode="r:xz") as tar:
        (member,) = tar.getmembers()
        tar.extract(member, directory, filter="data")
    return directory / member.name
