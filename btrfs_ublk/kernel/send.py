"""What differs between two read-only subvolumes, one a snapshot of the other, by btrfs'
send (linux/btrfs.h, fs/btrfs/send.h).

The kernel compares their trees of metadata, and skips what they share.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from uuid import UUID

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.btrfs import subvolume_id

_IOC_SEND = 0x40489426
#: struct btrfs_ioctl_send_args: descriptor, count and address of clone sources, parent,
#: flags, version, 28 unused bytes.
_SEND = struct.Struct("=qQQQQI28x")
#: BTRFS_SEND_FLAG_NO_FILE_DATA
_NO_DATA = 1
#: struct btrfs_stream_header: magic, version.
_STREAM = struct.Struct("<13sI")
_MAGIC = b"btrfs-stream\0"
#: struct btrfs_cmd_header: length of what follows, command, checksum.
_COMMAND = struct.Struct("<IHI")
#: struct btrfs_tlv_header: attribute, length of its value.
_ATTRIBUTE = struct.Struct("<HH")
_END = 21
#: Truncate, chmod, chown and utimes.
_ATTRIBUTE_COMMANDS = (17, 18, 19, 20)
_SUBVOLUME_COMMANDS = (1, 2)
#: BTRFS_SEND_A_PATH and _PATH_TO. A third one names what a new link leads to.
_PATHS = (15, 16)
#: BTRFS_SEND_A_CLONE_UUID
_CLONE_UUID = 20
_MAX_COMMAND_BYTES = 1 << 20


@dataclass
class ChangedPaths:
    """Paths that a stream names: all that were added, removed or changed, and some that
    are there only meanwhile. Of a file with several names, some may be missing. Of
    those in ``attributes`` at most size, mode, owner and times have changed; reading
    changes a time, too."""

    paths: set[bytes] = field(default_factory=set)
    attributes: set[bytes] = field(default_factory=set)


def changed_paths(subvolume: Path, parent: Path) -> ChangedPaths:
    """Return what has changed since ``parent``. No data are read.

    Both must be read-only. Raises BtrfsUblkError.
    """
    parent_id = subvolume_id(parent)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    failures: list[OSError] = []
    sender = threading.Thread(
        target=_send, args=(subvolume, parent_id, writing, failures)
    )
    with open(reading, "rb") as stream:
        sender.start()
        try:
            found, why = parse_stream(stream), ""
        except (EOFError, ValueError) as error:
            found, why = ChangedPaths(), str(error)
    # NB: the end that reads is closed, so the kernel stops sending.
    sender.join()
    if failures:
        why = failures[0].strerror or str(failures[0])
    if why:
        raise BtrfsUblkError(
            f"cannot compare {subvolume} with {parent}: {why}",
            hint="see the kernel log: dmesg | grep -i btrfs",
        )
    return found


def _send(
    subvolume: Path, parent_id: int, writing: int, failures: list[OSError]
) -> None:
    try:
        _ask_to_send(subvolume, parent_id, writing, _NO_DATA)
    except OSError as error:
        failures.append(error)
    finally:
        os.close(writing)


def _ask_to_send(subvolume: Path, parent_id: int, writing: int, flags: int) -> None:
    source = os.open(subvolume, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        clones = ctypes.c_uint64(parent_id)
        place = (1, ctypes.addressof(clones))
        argument = _SEND.pack(writing, *place, parent_id, flags, 0)
        # NB: another thread must read meanwhile, which fcntl.ioctl() does not promise
        # to let it do.
        library = ctypes.CDLL(None, use_errno=True)
        if library.ioctl(source, ctypes.c_ulong(_IOC_SEND), argument):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(source)


def write_changes(subvolume: Path, parent: Path, out: int) -> None:
    """Write what has changed since ``parent``, with data, as a stream to a descriptor.
    What is shared with the parent is not read. Both must be read-only. Raises OSError.
    """
    _ask_to_send(subvolume, subvolume_id(parent), out, 0)


@dataclass(frozen=True)
class StreamHead:
    """What a stream begins with: the subvolume that it makes, and the UUID of the one
    that it is made of; None: it is made of nothing."""

    name: bytes
    parent: UUID | None


def read_head(stream: IO[bytes]) -> StreamHead:
    """Read the beginning of a stream. Raises EOFError, ValueError."""
    magic, _ = _STREAM.unpack(_read(stream, _STREAM.size))
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    length, command, _ = _COMMAND.unpack(_read(stream, _COMMAND.size))
    if command not in _SUBVOLUME_COMMANDS or length > _MAX_COMMAND_BYTES:
        raise ValueError(f"its first command has number {command}")
    values = dict(_values(_read(stream, length)))
    parent = values.get(_CLONE_UUID)
    if parent is not None and len(parent) != len(UUID(int=0).bytes):
        raise ValueError(f"a UUID of {len(parent)} bytes")
    return StreamHead(
        values.get(_PATHS[0], b""), None if parent is None else UUID(bytes=parent)
    )


def _values(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes of a command. Raises ValueError."""
    at = 0
    while at < len(data):
        if at + _ATTRIBUTE.size > len(data):
            raise ValueError("an attribute is cut off")
        kind, size = _ATTRIBUTE.unpack_from(data, at)
        at += _ATTRIBUTE.size + size
        if at > len(data):
            raise ValueError("an attribute is cut off")
        yield kind, data[at - size : at]


def parse_stream(stream: IO[bytes]) -> ChangedPaths:
    """Return what a stream of send names. Raises EOFError, ValueError."""
    found = ChangedPaths()
    magic, _ = _STREAM.unpack(_read(stream, _STREAM.size))
    if magic != _MAGIC:
        raise ValueError(f"the stream begins with {magic!r}")
    while True:
        length, command, _ = _COMMAND.unpack(_read(stream, _COMMAND.size))
        if length > _MAX_COMMAND_BYTES:
            raise ValueError(f"a command of {length} bytes")
        data = _read(stream, length)
        if command == _END:
            found.attributes -= found.paths
            return found
        if command in _SUBVOLUME_COMMANDS:
            continue
        named = found.attributes if command in _ATTRIBUTE_COMMANDS else found.paths
        named |= {value for kind, value in _values(data) if kind in _PATHS}


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError("the stream ends early")
    return data
