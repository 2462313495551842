"""Control groups that count memory, of either version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from btrfs_ublk.capabilities import ROOT, require
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.resources.mountinfo import read_mountinfo

_KIND = "cgroup"
_PREFIX = "btrfs-ublk-"
#: The most that was ever in use: of version 2 (Linux 5.19), and of version 1.
_PEAKS = ("memory.peak", "memory.max_usage_in_bytes")


@dataclass(frozen=True)
class _MemoryGroups:
    name: ClassVar[str] = "control groups that count memory"
    cure: ClassVar[str] = "mount cgroup2, or memory of version 1, below /sys/fs/cgroup"

    def root(self) -> Path | None:
        """Where groups can be made: version 1 where memory is there, else version 2."""
        mounts = [x for x in read_mountinfo() if not x.read_only]
        for mount in mounts:
            if mount.fs_type == "cgroup" and mount.target.name == "memory":
                return mount.target
        for mount in mounts:
            if mount.fs_type != "cgroup2":
                continue
            with suppress(OSError):
                names = (mount.target / "cgroup.controllers").read_text().split()
                if "memory" in names:
                    return mount.target
        return None

    def probe(self) -> str | None:
        return None if self.root() else "there are none"


MEMORY_GROUPS = _MemoryGroups()


class MemoryGroup:
    """Made by memory_group()."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def members(self) -> Path:
        """A process that writes 0 here becomes one of the group."""
        return self.path / "cgroup.procs"

    def peak_bytes(self) -> int:
        """The most that its members ever used, together with what the kernel keeps for
        them: pages they read first, inodes, names of files. Raises CapabilityError.
        """
        for name in _PEAKS:
            with suppress(FileNotFoundError):
                return int((self.path / name).read_text())
        raise CapabilityError(
            f"{self.path} has none of {', '.join(_PEAKS)}", hint="use Linux >= 5.19"
        )


@contextmanager
def memory_group(*, ledger: Ledger | None = None) -> Iterator[MemoryGroup]:
    """A new control group, removed when the block is left, after all its members."""
    require(ROOT, MEMORY_GROUPS)
    ledger = ledger or process_ledger()
    root = MEMORY_GROUPS.root()
    assert root is not None
    with suppress(OSError):  # of version 2, where it may be so already
        (root / "cgroup.subtree_control").write_text("+memory")
    with ledger.holding(_KIND, root=str(root)) as entry:
        path = _path(entry)
        path.mkdir()
        yield MemoryGroup(path)


def _path(entry: Entry) -> Path:
    return Path(entry.details["root"]) / f"{_PREFIX}{entry.tag}"


@remover(_KIND)
def _remove(entry: Entry) -> bool:
    try:
        os.rmdir(_path(entry))
    except FileNotFoundError:
        return False
    return True
