"""A block device that the user names (--disk). It is read, and never written to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.capabilities import ROOT, Capability
from btrfs_ublk.errors import CapabilityError, UsageError
from btrfs_ublk.readers import read_direct
from btrfs_ublk.units import format_size


class _AsFound:
    """Whatever a block held when it was first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._blocks: dict[tuple[int, int], bytes] = {}

    def content(self, offset: int, length: int) -> bytes:
        key = (offset, length)
        if key not in self._blocks:
            self._blocks[key] = read_direct(self._path, offset, length)
        return self._blocks[key]


class Disk:
    name: ClassVar[str] = "disk"
    layer: ClassVar[Literal["device"]] = "device"
    description: ClassVar[str] = "the block device of --disk, which is only read"
    needs: ClassVar[Sequence[Capability]] = (ROOT,)

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        if setting.disk is None:
            raise CapabilityError("no disk was named", hint="--disk /dev/NAME")
        check_disk(setting.disk, setting.size_bytes)
        yield Subject(setting.disk, _AsFound(setting.disk))


def check_disk(path: Path, size_bytes: int) -> None:
    """Raise UsageError for what is no block device, or has less than that."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"--disk {path}: {error.strerror}") from error
    try:
        if not stat.S_ISBLK(os.fstat(fd).st_mode):
            raise UsageError(f"--disk {path} is no block device")
        found_bytes = os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)
    if found_bytes < size_bytes:
        raise UsageError(
            f"--disk {path} has {format_size(found_bytes)}, and "
            f"{format_size(size_bytes)} are to be read",
            hint=f"--size {found_bytes >> 20}M, or another disk",
        )


PEERS: Sequence[Peer] = [Disk()]
