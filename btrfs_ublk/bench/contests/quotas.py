"""What accounting costs btrfs: files of a subvolume, its snapshots, and a write to each
file of each.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from btrfs_ublk.bench.contest import Measure, OwnContest, Turn
from btrfs_ublk.bench.files import sync_file_system
from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.sprouts import Stopwatch, metadata_used_bytes, plain_btrfs
from btrfs_ublk.capabilities import BTRFS, LOOP, MKFS_BTRFS, ROOT, Capability
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError
from btrfs_ublk.resources.btrfs import (
    Accounting,
    create_snapshot,
    create_subvolume,
    enable_quota,
    filesystem_uuid,
)
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB

_FILE_BYTES = 8 * KIB
_BEFORE, _AFTER = b"\x11", b"\x22"
_CHECKED = 20

FILES = (1, 10, 100)
SNAPSHOTS = (1, 10, 100, 1000, 10_000)


def workload_name(files: int, snapshots: int) -> str:
    return f"{files} files, {snapshots} snapshots"


_WORKLOADS = {
    workload_name(files, snapshots): (files, snapshots)
    for files in FILES
    for snapshots in SNAPSHOTS
}


@dataclass(frozen=True)
class Quota:
    """A new file system each turn, with or without accounting."""

    name: str
    description: str
    accounting: Accounting | None

    layer: ClassVar[str] = "file system"
    needs: ClassVar[Sequence[Capability]] = (ROOT, BTRFS, LOOP, MKFS_BTRFS)

    @contextmanager
    def taking_part(self, setting: Setting) -> Iterator[Turn]:
        yield lambda workload, chances: self._measure(setting, workload, chances)

    def _measure(
        self, setting: Setting, workload: str, chances: random.Random
    ) -> Result:
        files, snapshots = _WORKLOADS[workload]
        with plain_btrfs(setting.directory, nodatacow=False) as mount:
            target = mount.target
            self._account(target)
            base = create_subvolume(target, "base")
            names = [f"file-{number}" for number in range(files)]
            for name in names:
                (base / name).write_bytes(_BEFORE * _FILE_BYTES)
            sync_file_system(target)
            watch = Stopwatch()
            copies = [
                create_snapshot(base, target, f"snapshot-{number}")
                for number in range(snapshots)
            ]
            snapshot_s = watch.lap()
            for copy in copies:
                for name in names:
                    _overwrite(copy / name)
            sync_file_system(target)
            write_s = watch.lap()
            _check(base, copies, names, chances)
            return {
                "seconds": snapshot_s + write_s,
                "snapshot_s": snapshot_s,
                "write_s": write_s,
                "metadata_mib": metadata_used_bytes(target) / MIB,
            }

    def _account(self, target: Path) -> None:
        if self.accounting is None:
            return
        try:
            enable_quota(target, self.accounting)
        except BtrfsUblkError as error:
            if isinstance(error.__cause__, OSError):
                raise CapabilityError(f"{error.message} (Linux 6.7 has it)") from error
            raise
        mode = Path(f"/sys/fs/btrfs/{filesystem_uuid(target)}/qgroups/mode")
        if mode.exists() and mode.read_text().strip() != self.accounting:
            raise BtrfsUblkError(f"{mode} says {mode.read_text().strip()}")


def _overwrite(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, _AFTER * BLOCK_BYTES, 0)
    finally:
        os.close(fd)


def _check(
    base: Path, copies: Sequence[Path], names: Sequence[str], chances: random.Random
) -> None:
    """Some of the files. Raises BtrfsUblkError."""
    rest = _BEFORE * (_FILE_BYTES - BLOCK_BYTES)
    for _ in range(_CHECKED):
        name = chances.choice(names)
        path = chances.choice(copies) / name
        if path.read_bytes() != _AFTER * BLOCK_BYTES + rest:
            raise BtrfsUblkError(f"{path} is not what was written")
        if (base / name).read_bytes() != _BEFORE * _FILE_BYTES:
            raise BtrfsUblkError(f"{base / name} has changed with its snapshot")


QUOTAS = OwnContest(
    (
        Measure("seconds", "s", digits=3),
        Measure("snapshot_s", "s", digits=3),
        Measure("write_s", "s", digits=3),
        Measure("metadata_mib", "MiB", digits=1),
    ),
    (
        Quota("none", "btrfs without quotas", None),
        Quota("qgroup", "btrfs with qgroups: shared extents are looked up", "qgroup"),
        Quota("squota", "btrfs with simple quotas: the creator pays", "squota"),
    ),
    {name: name for name in _WORKLOADS},
)
