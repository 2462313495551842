"""Control groups that limit memory, of either version."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.capabilities import ROOT, Probed, require
from btrfs_ublk.kernel.mountinfo import read_mountinfo


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


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Make a control group, removed at the end of the block, after all its members."""
    require(ROOT, MEMORY_GROUPS)
    root = _root()
    assert root is not None
    with suppress(OSError):  # for version 2; it may be enabled already
        (root / "cgroup.subtree_control").write_text("+memory")
    path = root / f"btrfs-ublk-{os.getpid()}-{os.urandom(4).hex()}"
    path.mkdir()
    try:
        yield MemoryGroup(path)
    finally:
        path.rmdir()
