"""Persistent memory, which files are mapped from and read without a page cache (DAX):
what is closest to doing nothing, and the stand-in for what needs memory of a host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.read_only import EXT4, MKFS_EXT4
from btrfs_ublk.bench.stamps import STAMPS, write_content
from btrfs_ublk.capabilities import IN_VM_VARIABLE, ROOT, Capability
from btrfs_ublk.errors import CapabilityError, CommandError
from btrfs_ublk.process import run
from btrfs_ublk.resources import blockdev
from btrfs_ublk.resources.mount import mounted
from btrfs_ublk.units import format_size

_DEVICE = Path("/dev/pmem0")
_MODULES = ("nd_e820", "nd_pmem")
_TIMEOUT_S = 60.0
#: ext4 keeps a part for itself, and for root.
_ROOM = 1.2


@dataclass(frozen=True)
class _Pmem:
    name: ClassVar[str] = "persistent memory"
    cure: ClassVar[str] = "run this in a VM that has some: scripts/vm --pmem 512M"

    def probe(self) -> str | None:
        if os.environ.get(IN_VM_VARIABLE) != "1":
            return "what it holds would be lost, so only that of scripts/vm is used"
        if not _DEVICE.exists():
            try:
                run(["modprobe", "--all", *_MODULES], timeout_s=_TIMEOUT_S)
            except CommandError as error:
                return error.message.splitlines()[-1].strip()
        return None if _DEVICE.exists() else f"there is no {_DEVICE}"


PMEM = _Pmem()


@dataclass(frozen=True)
class DaxExt4:
    name: ClassVar[str] = "dax-ext4"
    layer: ClassVar[Literal["file"]] = "file"
    description: ClassVar[str] = "a file of ext4 with DAX, on persistent memory"
    needs: ClassVar[Sequence[Capability]] = (ROOT, PMEM, EXT4, MKFS_EXT4)

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        found_bytes = blockdev.size_bytes(_DEVICE)
        if found_bytes < _ROOM * setting.size_bytes:
            raise CapabilityError(
                f"{_DEVICE} has {format_size(found_bytes)}, too little for a file of "
                f"{format_size(setting.size_bytes)}",
                hint="scripts/vm --pmem SIZE, or a smaller --size",
            )
        run(["mkfs.ext4", "-q", "-b", "4096", _DEVICE], timeout_s=_TIMEOUT_S)
        target = setting.new_directory("mnt")
        with mounted(_DEVICE, target, fs_type="ext4", options=["dax=always"]):
            path = target / "file"
            write_content(path, STAMPS, setting.size_bytes)
            yield Subject(path, STAMPS, writable=True)


PEERS: Sequence[Peer] = [DaxExt4()]
