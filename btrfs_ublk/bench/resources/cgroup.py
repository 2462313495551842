"""Control groups that count memory, of either version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.capabilities import ROOT, Probed, require
from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.kernel.mountinfo import read_mountinfo

_KIND = "cgroup"
_PREFIX = "btrfs-ublk-"
#: The files with the peak use: of version 2 (Linux 5.19), and of version 1.
_PEAKS = ("memory.peak", "memory.max_usage_in_bytes")


def _root() -> Path | None:
    """Return where groups can be made: version 1 if it has memory, else 2."""
    mounts = [x for x in read_mountinfo() if not x.read_only]
    for mount in mounts:
        if mount.fs_type == "cgroup" and mount.target.name == "memory":
            return mount.target
    for mount in mounts:
        if mount.fs_type == "cgroup2":
            with suppress(OSError):
                names = (mount.target / "cgroup.controllers").read_text().split()
                if "memory" in names:
                    return mount.target
    return None


MEMORY_GROUPS = Probed(
    "control groups that count memory",
    "mount cgroup2, or memory of version 1, below /sys/fs/cgroup",
    lambda: None if _root() else "there are none",
)


class MemoryGroup:
    """A control group that memory_group() has made."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def members(self) -> Path:
        """The file in which a process writes 0 to join the group."""
        return self.path / "cgroup.procs"

    def limit(self, size_bytes: int) -> None:
        """Limit the memory of all members together."""
        names = ("memory.max", "memory.limit_in_bytes")
        path = next(x for name in names if (x := self.path / name).exists())
        path.write_text(str(size_bytes))

    def peak_bytes(self) -> int:
        """Return the most memory that its members ever used, including the kernel's for
        them: pages that they read first, inodes, file names. Raises CapabilityError.
        """
        for name in _PEAKS:
            with suppress(FileNotFoundError):
                return int((self.path / name).read_text())
        raise CapabilityError(
            f"{self.path} has none of {', '.join(_PEAKS)}", hint="use Linux >= 5.19"
        )


@contextmanager
def memory_group(*, ledger: Ledger | None = None) -> Iterator[MemoryGroup]:
    """Make a control group, removed at the end of the block, after all its members."""
    require(ROOT, MEMORY_GROUPS)
    ledger = ledger or process_ledger()
    root = _root()
    assert root is not None
    with suppress(OSError):  # for version 2; it may be enabled already
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
