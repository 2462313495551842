"""Adds and removes devices many times, one after another and many at once, or brings
volumes up and down, to see how long that takes, and whether anything grows.

``scripts/torture device-cycles --help``
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import campaign
import click
import psutil
from cycle_tables import tables

from btrfs_ublk.base.capabilities import (
    BTRFS,
    FUSE,
    LOOP,
    ROOT,
    UBLK,
    Helper,
    require,
)
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import wait_until_quiet
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.stats import latency_record
from btrfs_ublk.device import show_device
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.temporary import loops_below, tempdir
from btrfs_ublk.kernel.ublk_devices import list_ublk_devices
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FrontEndName,
    PatternSegment,
)
from btrfs_ublk.units import BLOCK_BYTES, GIB, KIB, MIB
from btrfs_ublk.volume import (
    VolumeDefinition,
    VolumeFile,
    down_volume,
    remove_volume,
    up_volume,
)

#: In these cycles the kernel's caches fill up, so growth does not count yet.
_WARM_UP_CYCLES = 200
#: Memory may grow by this much, as it always varies a little.
_SLACK_BYTES = 2 * MIB
#: One cycle may leave this much. Objects that a driver leaks are usually larger.
_BYTES_PER_CYCLE = 64
#: Freed memory waits for a grace period of RCU, and the last child has to end.
_SETTLE_S = 2.0
_READY_TIMEOUT_S = 120.0
_SHOWN_CACHES = 5
#: Rows of the table.
_STRETCHES = 10

_DEVICE_BYTES = 16 * MIB
_STILL = "still"
#: These may need a while to go, on a busy machine.
_SOON_GONE = ("daemon_files", "daemon_threads", "processes", "loops")
_LOOKS = 5


def counts() -> dict[str, int]:
    """Return counts that must not grow. "slab_bytes" are kernel objects except those
    that it drops if memory is short (SUnreclaim); "open_files" are this process's.
    """
    return {
        "slab_bytes": _slab_bytes(),
        "open_files": len(os.listdir("/proc/self/fd")),
        "servers": sum(map(_is_server, Path("/proc").glob("[0-9]*"))),
        "devices": len(list_ublk_devices()),
    }


def _slab_bytes() -> int:
    return _kib_of(Path("/proc/meminfo"), "SUnreclaim") * KIB


def _kib_of(path: Path, name: str) -> int:
    """Return the number in the line of that name, of a file as /proc/PID/status."""
    found = re.search(rf"^{name}:\s*([0-9]+)", path.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _is_server(process: Path) -> bool:
    try:
        program = os.readlink(process / "exe")
    except OSError:  # it has ended, or is a kernel thread
        return False
    return program == str(helper_path(SERVER).resolve())


def slab_caches() -> dict[str, int]:
    """Return bytes of each cache's live objects (slabinfo(5)); {} if that is hidden."""
    try:
        lines = Path("/proc/slabinfo").read_text().splitlines()[2:]
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {name: int(used) * int(size) for name, used, _, size, *_ in fields}


def cycle(front_end: FrontEndName, depth: int) -> dict[str, int]:
    """Add a device, read it once, and remove it; return nanoseconds of each step."""
    begin = time.monotonic_ns()
    with _device(front_end, depth) as server:
        added = time.monotonic_ns()
        _check(server)
        read = time.monotonic_ns()
    end = time.monotonic_ns()
    return {"add": added - begin, "read": read - added, "remove": end - read}


@contextmanager
def _device(front_end: FrontEndName, depth: int) -> Iterator[BlockServer]:
    segment = PatternSegment(offset=0, length=_DEVICE_BYTES)
    with BlockServer(
        Description(_DEVICE_BYTES, [segment]),
        front_end=front_end,
        queues=1,
        depth=depth,
        ready_timeout_s=_READY_TIMEOUT_S,
    ) as server:
        yield server


def _check(server: BlockServer) -> None:
    offset = _DEVICE_BYTES // 2
    found = read_direct(server.device, offset, BLOCK_BYTES)
    if found != server.description.content(offset, BLOCK_BYTES):
        raise BtrfsUblkError(f"{server.device} reads wrong data")


def at_once(front_end: FrontEndName, depth: int, *, devices: int) -> Result:
    """Add ``devices`` devices in as many threads, read all, and remove all."""
    all_there = threading.Barrier(devices, timeout=2 * _READY_TIMEOUT_S)
    moments: list[float] = []

    def one() -> str:
        try:
            with _device(front_end, depth) as server:
                all_there.wait()
                moments.append(time.monotonic())
                _check(server)
                # Remove none before all have been added and read.
                all_there.wait()
                moments.append(time.monotonic())
                return str(server.device)
        except BaseException:
            all_there.abort()
            raise

    begin_s = time.monotonic()
    with ThreadPoolExecutor(devices) as pool:
        futures = [pool.submit(one) for _ in range(devices)]
    end_s = time.monotonic()
    errors = [error for future in futures if (error := future.exception())]
    # The other errors say only that a thread waited for one that had failed.
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    names = {future.result() for future in futures}
    if len(names) != devices:
        raise BtrfsUblkError(f"{devices} devices had only {len(names)} names")
    return {
        "devices_at_once": devices,
        "add_s": moments[0] - begin_s,
        "remove_s": end_s - moments[-1],
    }


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


def settled_counts() -> dict[str, int]:
    """Return counts() after a pause, in which the kernel frees memory."""
    _settle()
    return counts()


def _settle() -> None:
    """Have the kernel free what nothing uses. NB: the inodes that it would drop if
    memory is short have parts of their own, of security modules, that are counted as
    what it cannot drop."""
    Path("/proc/sys/vm/drop_caches").write_text("2")  # of inodes and names
    time.sleep(_SETTLE_S)  # nothing signals the end of a grace period


def run_cycles(
    front_end: FrontEndName, depth: int, *, cycles: int, stretches: int
) -> Iterator[Result]:
    """Return a result for each stretch of cycles. The last one tells what has grown
    since the warm-up.
    """
    warm_up = min(_WARM_UP_CYCLES, cycles // 2)
    for _ in range(warm_up):
        cycle(front_end, depth)
    first, first_caches = settled_counts(), slab_caches()
    done = warm_up
    for end in _ends(warm_up, cycles, stretches):
        times: dict[str, list[int]] = {"add": [], "read": [], "remove": []}
        while done < end:
            for name, taken_ns in cycle(front_end, depth).items():
                times[name].append(taken_ns)
            done += 1
        is_last = done == cycles
        now = settled_counts() if is_last else counts()
        result: Result = {
            "what": "cycles",
            "cycles": done,
            "counts": now,
            "times": {name: latency_record(values) for name, values in times.items()},
        }
        if is_last:
            result["growth"] = growth(first, now, cycles=done - warm_up)
            result["caches"] = grown_caches(first_caches, slab_caches())
        yield result


def _ends(start: int, end: int, parts: int) -> list[int]:
    return [start + (end - start) * part // parts for part in range(1, parts + 1)]


def grown_caches(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the caches that grew most, and by how many bytes."""
    grown = {name: size - before.get(name, 0) for name, size in after.items()}
    most = sorted(grown.items(), key=lambda item: -item[1])[:_SHOWN_CACHES]
    return {name: by for name, by in most if by > 0}


def run_rounds(
    front_end: FrontEndName, depth: int, *, devices: int, rounds: int
) -> Iterator[Result]:
    """Return a result for each round. The last tells what has grown since the first."""
    first: dict[str, int] | None = None
    for round_ in range(1, rounds + 1):
        result = at_once(front_end, depth, devices=devices)
        now = settled_counts()
        result |= {"what": "at once", "round": round_, "counts": now}
        first = first or now
        if round_ == rounds:
            result["growth"] = growth(first, now, cycles=devices * (rounds - 1))
        yield result


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

    def run(self, cycles: int) -> dict[str, list[int]]:
        """Do so many cycles, and return nanoseconds of each step of each."""
        parts = [0, *_ends(0, cycles, len(self._names))]
        shares = [end - begin for begin, end in zip(parts, parts[1:], strict=False)]
        times: dict[str, list[int]] = {"add": [], "read": [], "remove": []}
        for result in self._pool.map(self._several, self._names, shares):
            for step, taken_ns in result.items():
                times[step] += taken_ns
        return times

    def _several(self, name: str, cycles: int) -> dict[str, list[int]]:
        path = self._top / f"mnt-{name}/file"
        times: dict[str, list[int]] = {"add": [], "read": [], "remove": []}
        for number in range(cycles):
            moments = [time.monotonic_ns()]
            up_volume(name, self._definitions[name])
            moments.append(time.monotonic_ns())
            if path.read_bytes() != self._content:
                raise BtrfsUblkError(f"{path} reads wrong data")
            moments.append(time.monotonic_ns())
            self._tags.add(device_directory(name).spec().tag)
            if number == cycles - 1:
                state = show_device(name).state
                assert state.supervisor is not None
                self._daemons.add(state.supervisor.pid)
                for keeper in state.keepers:
                    status = Path(f"/proc/{keeper.process.pid}/status")
                    used = _kib_of(status, "RssAnon") * KIB
                    self._keeper_bytes = max(self._keeper_bytes, used)
            begin_ns = time.monotonic_ns()
            down_volume(name)
            moments.append(moments[-1] + time.monotonic_ns() - begin_ns)
            for step, begin, end in zip(times, moments, moments[1:], strict=False):
                times[step].append(end - begin)
        return times

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


def run_volume_cycles(
    volumes: VolumeCycles, *, cycles: int, stretch: int
) -> Iterator[Result]:
    """Return a result for each stretch of cycles; all after the first tell what has
    grown since. Of the kernel's memory, which others use as well, only the last does,
    and compares the least of each third."""
    first: dict[str, int] = {}
    slabs = []
    ends = [*range(stretch, cycles, stretch), cycles]
    begin = 0
    for end in ends:
        times = volumes.run(end - begin)
        now = volumes.counts()
        for _ in range(_LOOKS):
            if any(now[x] > first.get(x, now[x]) for x in now if x in _SOON_GONE):
                now = volumes.counts()
        slabs.append(now["slab_bytes"])
        first = first or now
        third = max(1, len(slabs) // 3)
        slab = {"slab_bytes": min(slabs[:third])}, {"slab_bytes": min(slabs[-third:])}
        compared = now | (slab[1] if end == cycles else {"slab_bytes": 0})
        yield {
            "what": "volume cycles",
            "cycles": end,
            "counts": now,
            "times": {name: latency_record(values) for name, values in times.items()},
            "growth": growth(first | slab[0], compared, cycles=end - ends[0]),
        }
        begin = end


@click.command(context_settings=campaign.SETTINGS)
@click.option("--cycles", type=click.IntRange(min=20), default=1000)
@click.option("--at-once", type=click.IntRange(0, 256), default=32)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, help="Of many at once."
)
@click.option("--front-end", type=click.Choice(["ublk", "fuse"]), default="ublk")
@click.option("--depth", type=campaign.COUNT, default=4, help="Of each device's queue.")
@click.option(
    "--volumes",
    type=click.IntRange(0, 64),
    default=0,
    help="Instead: bring so many volumes up and down at a time.",
)
@click.option(
    "--stretch", type=campaign.COUNT, default=500, help="Of volumes, between two looks."
)
@campaign.limit_option
@options.parent_option
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="How long it may wait for a quiet machine.",
)
@campaign.output_option
def command(
    cycles: int,
    at_once: int,
    rounds: int,
    front_end: FrontEndName,
    depth: int,
    volumes: int,
    stretch: int,
    limit_s: float,
    parent: Path,
    patience_s: float,
    output: Path | None,
) -> None:
    """Add a device, read a block of it, and remove it, many times; then many at once.

    Exit status 1: the kernel's memory, open files, servers or devices grew by more
    than they may; with --volumes, also the daemon, mounts or files.
    """
    front_end_needs = (UBLK,) if front_end == "ublk" else (FUSE, LOOP)
    require(ROOT, Helper(SERVER), *front_end_needs)
    wait_until_quiet(timeout_s=patience_s)
    if list_ublk_devices():
        raise UsageError("there are ublk devices: they would be counted")
    process_ledger()
    parameters: dict[str, object] = {"cycles": cycles, "front_end": front_end}
    if volumes:
        require(BTRFS)
        parameters |= {"volumes": volumes, "stretch": stretch}
    else:
        parameters |= {"at_once": at_once, "depth": depth}
    results = campaign.Results(
        "device_cycles",
        tables,
        parameters=parameters,
        directory=parent,
        output=output,
        faults=lambda document: [
            str(x["growth"]) for x in document["results"] if x.get("growth")
        ],
    )
    done = 0
    with results, ExitStack() as stack:
        if volumes:
            end_s = time.monotonic() + limit_s
            top = stack.enter_context(tempdir(parent=parent))
            stack.enter_context(campaign.apart(top))
            made = stack.enter_context(VolumeCycles(top, front_end, volumes))
            found = run_volume_cycles(made, cycles=cycles, stretch=stretch)
        else:
            end_s = math.inf
            found = run_cycles(front_end, depth, cycles=cycles, stretches=_STRETCHES)
        for result in found:
            results.add(result, rounds=result["cycles"] - done)
            done = result["cycles"]
            options.progress(f"{done} cycles {result.get('growth') or ''}")
            if time.monotonic() > end_s:
                break
        if at_once and not volumes:
            for result in run_rounds(front_end, depth, devices=at_once, rounds=rounds):
                results.add(result, rounds=0)
                options.progress(f"round {result['round']} of {rounds}")
    results.conclude()


if __name__ == "__main__":
    run_command(command, name="device_cycles.py")
