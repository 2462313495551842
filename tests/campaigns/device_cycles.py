"""Brings volumes up and down many times, several at once: nothing may grow.

``scripts/torture device-cycles --help``
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import campaign
import click
import psutil
from campaign import Run

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import Column, listing
from btrfs_ublk.device import show_device
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import GIB, KIB, MIB
from btrfs_ublk.volume import (
    VolumeDefinition,
    VolumeFile,
    down_volume,
    remove_volume,
    up_volume,
)

#: Memory may grow by this much, as it always varies a little.
_SLACK_BYTES = 2 * MIB
#: One cycle may leave this much. Objects that a driver leaks are usually larger.
_BYTES_PER_CYCLE = 64
#: Freed memory waits for a grace period of RCU, and the last child has to end.
_SETTLE_S = 2.0
_STILL = "still"
#: These may need a while to go, on a busy machine.
_SOON_GONE = ("daemon_files", "daemon_threads", "processes", "loops")
_LOOKS = 5


def _slab_bytes() -> int:
    return _kib_of(Path("/proc/meminfo"), "SUnreclaim") * KIB


def _kib_of(path: Path, name: str) -> int:
    """Return the number in the line of that name, of a file as /proc/PID/status."""
    found = re.search(rf"^{name}:\s*([0-9]+)", path.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def growth(
    before: Mapping[str, int], after: Mapping[str, int], *, cycles: int
) -> dict[str, str]:
    """Return messages about what has grown by more than it may; only bytes may."""
    slack = _SLACK_BYTES + cycles * _BYTES_PER_CYCLE
    allowed = {name: slack for name in before if name.endswith("_bytes")}
    return {
        name: f"{name} grew by {after[name] - before[name]:,} in {cycles:,} cycles, "
        f"{allowed.get(name, 0):,} are allowed"
        for name in before
        if after[name] - before[name] > allowed.get(name, 0)
    }


def _settle() -> None:
    """Have the kernel free what nothing uses. NB: the inodes that it would drop if
    memory is short have parts of their own, of security modules, that are counted as
    what it cannot drop."""
    Path("/proc/sys/vm/drop_caches").write_text("2")  # of inodes and names
    time.sleep(_SETTLE_S)  # nothing signals the end of a grace period


class VolumeCycles:
    """Volumes that are brought up and down again and again, several at a time. One more
    stays up, as the daemon ends without any."""

    def __init__(self, top: Path, front_end: FrontEndName, count: int) -> None:
        self._top = top
        self._names = [f"v{number}" for number in range(count)]
        self._content = os.urandom(100_000)
        (top / "content").write_bytes(self._content)
        self._definition = VolumeDefinition(
            size_bytes=GIB,
            writable_bytes=256 * MIB,
            front_end=front_end,
            files=(VolumeFile.parse(f"file={top}/content"),),
        )
        #: Of all devices that there were.
        self._tags: set[str] = set()
        self._daemons: set[int] = set()
        self._keeper_bytes = 0
        self._pool = ThreadPoolExecutor(count)
        self._definitions: dict[str, VolumeDefinition] = {}

    def __enter__(self) -> VolumeCycles:
        up_volume(_STILL, replace(self._definition, mount=self._top / "mnt"))
        list(self._pool.map(self._make, self._names))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for name in (_STILL, *self._names):
            down_volume(name)
            remove_volume(name)

    def _make(self, name: str) -> None:
        mount = self._top / f"mnt-{name}"
        mount.mkdir()
        self._definitions[name] = replace(self._definition, mount=mount)
        up_volume(name, self._definitions[name])
        down_volume(name)

    def run(self, cycles: int) -> None:
        """Do so many cycles."""
        each, more = divmod(cycles, len(self._names))
        shares = [each + (number < more) for number in range(len(self._names))]
        list(self._pool.map(self._several, self._names, shares))

    def _several(self, name: str, cycles: int) -> None:
        path = self._top / f"mnt-{name}/file"
        for number in range(cycles):
            up_volume(name, self._definitions[name])
            if path.read_bytes() != self._content:
                raise BtrfsUblkError(f"{path} reads wrong data")
            self._tags.add(device_directory(name).spec().tag)
            if number == cycles - 1:
                state = show_device(name).state
                assert state.supervisor is not None
                self._daemons.add(state.supervisor.pid)
                for keeper in state.keepers:
                    status = Path(f"/proc/{keeper.process.pid}/status")
                    used = _kib_of(status, "RssAnon") * KIB
                    self._keeper_bytes = max(self._keeper_bytes, used)
            down_volume(name)

    def counts(self) -> dict[str, int]:
        """Return counts that must not grow, while all but one are down. Of the daemon:
        memory that it does not share, descriptors and threads. Of keepers, the most
        memory that one had, before it was asked to end. Of all
        directories of these volumes, files, and bytes of those in its run directory."""
        _settle()
        if len(self._daemons) != 1:
            raise BtrfsUblkError(f"there were {len(self._daemons)} daemons, one by one")
        daemon = Path("/proc", str(*self._daemons))
        files = [path for path in self._top.rglob("*") if not path.is_dir()]
        run = self._top / "run"
        return {
            "slab_bytes": _slab_bytes(),
            "daemon_bytes": _kib_of(daemon / "status", "RssAnon") * KIB,
            "daemon_files": len(os.listdir(daemon / "fd")),
            "daemon_threads": len(os.listdir(daemon / "task")),
            "keeper_bytes": self._keeper_bytes,
            "open_files": len(os.listdir("/proc/self/fd")),
            "processes": self._processes({os.getpid(), *self._daemons}),
            "loops": len(loops_below(self._top)) + len(self._loops_of_servers()),
            "mounts": sum(self._top in x.target.parents for x in read_mountinfo()),
            "files": len(files),
            "run_bytes": sum(x.stat().st_size for x in files if run in x.parents),
        }

    def _processes(self, parents: set[int]) -> int:
        """Return the number of our processes, also of those that nobody waits for."""
        found = 0
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                named = any(str(self._top) in word for word in process.cmdline())
                found += named or process.ppid() in parents
        return found

    def _loops_of_servers(self) -> list[str]:
        found = []
        for link in Path("/sys/block").glob("loop*/loop/backing_file"):
            with suppress(OSError):
                found.append(link.read_text().strip().removeprefix("/btrfs-ublk-"))
        return [tag for tag in found if tag in self._tags]


def run_cycles(volumes: VolumeCycles, *, cycles: int, stretch: int) -> Iterator[Result]:
    """Return a result for each stretch of cycles; all after the first tell what has
    grown since. Of the kernel's memory, which others use as well, only the last does,
    and compares the least of each third."""
    first: dict[str, int] = {}
    slabs = []
    ends = [*range(stretch, cycles, stretch), cycles]
    begin = 0
    for end in ends:
        volumes.run(end - begin)
        now = volumes.counts()
        for _ in range(_LOOKS):
            if any(now[x] > first.get(x, now[x]) for x in now if x in _SOON_GONE):
                now = volumes.counts()
        slabs.append(now["slab_bytes"])
        first = first or now
        third = max(1, len(slabs) // 3)
        slab = {"slab_bytes": min(slabs[:third])}, {"slab_bytes": min(slabs[-third:])}
        compared = now | (slab[1] if end == cycles else {"slab_bytes": 0})
        grown = growth(first | slab[0], compared, cycles=end - ends[0])
        yield {"cycles": end, "counts": now, "growth": grown} | {
            "problems": list(grown.values())
        }
        begin = end


def _count(name: str) -> Column:
    scale = 1 / KIB if name.endswith("_bytes") else 1.0
    head = name.replace("_bytes", "_KiB").replace("_", " ")
    return Column(head, lambda its: float(its[0]["counts"][name]), 0, scale)


def tables(document: Document) -> list[Table]:
    results = document["results"]
    columns = [Column("cycles", "cycles"), *map(_count, results[0]["counts"])]
    note = "Counted while all volumes but one were down."
    return [listing("Volumes up and down", results, columns, note=note)]


@campaign.command(
    "device-cycles",
    click.option("--cycles", type=click.IntRange(min=20), default=1000),
    click.option(
        "--volumes",
        type=click.IntRange(1, 64),
        default=4,
        help="So many are brought up and down at a time.",
    ),
    click.option(
        "--stretch", type=campaign.COUNT, default=500, help="Cycles between two looks."
    ),
    tables=tables,
    needs=(ROOT, BTRFS, LOOP),
    seeded=False,
    front_ends=True,
    recorded=("cycles", "volumes", "stretch"),
)
def command(run: Run, cycles: int, volumes: int, stretch: int) -> None:
    """Bring volumes up, read a file, and take them down, many times.

    Fails when the kernel's memory, open files, the daemon, mounts, processes or files
    grew by more than they may.
    """
    process_ledger()
    with VolumeCycles(run.directory, run.front_end, volumes) as made:
        for result in run_cycles(made, cycles=cycles, stretch=stretch):
            run.add(result, rounds=result["cycles"] - run.done)
            options.progress(f"{run.done} cycles {result['growth'] or ''}")
            if not run.in_time():
                break


if __name__ == "__main__":
    run_command(command, name="device_cycles.py")
