"""Adds and removes devices many times, one after another and many at once, to see how
long that takes, and whether anything grows.

``python tests/campaigns/device_cycles.py --help``
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import campaign
import click
from cycle_tables import COUNTED, tables

from btrfs_ublk.base.capabilities import FUSE, LOOP, ROOT, UBLK, Helper, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import wait_until_quiet
from btrfs_ublk.bench.report import Result, make_document, show
from btrfs_ublk.bench.stats import latency_record
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.ublk_devices import list_ublk_devices
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FrontEndName,
    PatternSegment,
)
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB

#: In these cycles the kernel's caches fill up, so growth does not count yet.
_WARM_UP_CYCLES = 200
#: The kernel's memory may grow by this much, as it always varies a little.
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


def counts() -> dict[str, int]:
    """Return counts that must not grow. "slab_bytes" are kernel objects except those
    that it drops if memory is short (SUnreclaim); "open_files" are this process's.
    """
    slab = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "SUnreclaim":
            slab = int(value.split()[0]) * KIB
    return {
        "slab_bytes": slab,
        "open_files": len(os.listdir("/proc/self/fd")),
        "servers": sum(map(_is_server, Path("/proc").glob("[0-9]*"))),
        "devices": len(list_ublk_devices()),
    }


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
    """Return messages about what has grown by more than it may."""
    allowed = {"slab_bytes": _SLACK_BYTES + cycles * _BYTES_PER_CYCLE}
    return {
        name: f"{name} grew by {after[name] - before[name]:,} in {cycles:,} cycles, "
        f"{allowed.get(name, 0):,} are allowed"
        for name in COUNTED
        if after[name] - before[name] > allowed.get(name, 0)
    }


def settled_counts() -> dict[str, int]:
    """Return counts() after a pause, in which the kernel frees memory."""
    time.sleep(_SETTLE_S)  # nothing signals the end of a grace period
    return counts()


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


@click.command(context_settings=campaign.SETTINGS)
@click.option("--cycles", type=click.IntRange(min=20), default=1000)
@click.option("--at-once", type=click.IntRange(0, 256), default=32)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, help="Of many at once."
)
@click.option("--front-end", type=click.Choice(["ublk", "fuse"]), default="ublk")
@click.option("--depth", type=campaign.COUNT, default=4, help="Of each device's queue.")
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
    parent: Path,
    patience_s: float,
    output: Path | None,
) -> None:
    """Add a device, read a block of it, and remove it, many times; then many at once.

    Exit status 1: the kernel's memory, open files, servers or devices grew by more
    than they may.
    """
    front_end_needs = (UBLK,) if front_end == "ublk" else (FUSE, LOOP)
    require(ROOT, Helper(SERVER), *front_end_needs)
    wait_until_quiet(timeout_s=patience_s)
    if list_ublk_devices():
        raise UsageError("there are ublk devices: they would be counted")
    process_ledger()
    document = make_document(
        "device_cycles",
        parameters={
            "cycles": cycles,
            "at_once": at_once,
            "front_end": front_end,
            "depth": depth,
        },
        directory=parent,
        results=[],
    )
    document["script"] = "tests/campaigns/device_cycles.py"
    for result in run_cycles(front_end, depth, cycles=cycles, stretches=_STRETCHES):
        document["results"].append(result)
        options.progress(f"{result['cycles']} cycles")
    if at_once:
        for result in run_rounds(front_end, depth, devices=at_once, rounds=rounds):
            document["results"].append(result)
            options.progress(f"round {result['round']} of {rounds}")
    campaign.store(document, tables(document), output)
    show(document)
    grown = [str(each["growth"]) for each in document["results"] if each.get("growth")]
    campaign.conclude(grown, rounds=cycles)


if __name__ == "__main__":
    run_command(command, name="device_cycles.py")
