"""Peers on the kernel's own disks: the device itself, and a file of btrfs on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.sprouts import formatted_btrfs
from btrfs_ublk.bench.stamps import STAMPS, write_content
from btrfs_ublk.capabilities import BTRFS, MKFS_BTRFS, ROOT, Capability
from btrfs_ublk.units import MIB

#: What btrfs needs for itself, with metadata once.
_BTRFS_BYTES = 256 * MIB

#: A new, writable device of at least so many bytes.
Disk = Callable[[Setting, int], AbstractContextManager[Path]]


@dataclass(frozen=True)
class RawDisk:
    name: str
    what: str
    disk: Disk
    driver: Capability

    layer: Literal["device"] = "device"

    @property
    def description(self) -> str:
        return f"{self.what} itself"

    @property
    def needs(self) -> Sequence[Capability]:
        return ROOT, self.driver

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        with self.disk(setting, setting.size_bytes) as device:
            write_content(device, STAMPS, setting.size_bytes)
            yield Subject(device, STAMPS, writable=True)


@dataclass(frozen=True)
class BtrfsFile:
    """``nodatasum`` as all clones on sprouts are; else with checksums, as is usual."""

    name: str
    what: str
    disk: Disk
    driver: Capability
    nodatasum: bool

    layer: Literal["file"] = "file"

    @property
    def description(self) -> str:
        sums = "without" if self.nodatasum else "with"
        return f"a file of btrfs, {sums} checksums, on {self.what}"

    @property
    def needs(self) -> Sequence[Capability]:
        return ROOT, self.driver, BTRFS, MKFS_BTRFS

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        size_bytes = setting.size_bytes + _BTRFS_BYTES
        target = setting.new_directory(self.name)
        with self.disk(setting, size_bytes) as device:
            with formatted_btrfs(
                device, target, options=["nodatasum"] if self.nodatasum else []
            ):
                write_content(target / "file", STAMPS, setting.size_bytes)
                yield Subject(target / "file", STAMPS, writable=True)


def disk_peers(name: str, what: str, disk: Disk, driver: Capability) -> list[Peer]:
    """NAME, btrfs-NAME, btrfs-NAME-nodatasum."""
    return [
        RawDisk(name, what, disk, driver),
        BtrfsFile(f"btrfs-{name}", what, disk, driver, nodatasum=False),
        BtrfsFile(f"btrfs-{name}-nodatasum", what, disk, driver, nodatasum=True),
    ]
