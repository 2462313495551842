"""Devices added and removed many times, one after another and many at once: how long it
takes, and whether anything grows.

``python -m btrfs_ublk.bench.device_cycles --help``
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import wait_until_quiet
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.stats import grouped, latency_record
from btrfs_ublk.capabilities import FUSE, LOOP, ROOT, UBLK, Helper, require
from btrfs_ublk.entry import run_command
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.helpers import SERVER, helper_path
from btrfs_ublk.ledger import process_ledger
from btrfs_ublk.readers import read_direct
from btrfs_ublk.resources.ublk_devices import list_ublk_devices
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FrontEndName,
    PatternSegment,
)
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB

#: The kernel's caches fill up first: what grows until then is not counted.
_WARM_UP_CYCLES = 200
#: What the kernel's memory may grow by, whatever the cycles; it breathes.
_SLACK_BYTES = 2 * MIB
#: What one cycle may leave. What a driver forgets is larger, as a rule.
_BYTES_PER_CYCLE = 64
#: Freed memory waits for a grace period of RCU, and the last child for its end.
_SETTLE_S = 2.0
_READY_TIMEOUT_S = 120.0
_SHOWN_CACHES = 5
#: Rows of the table.
_STRETCHES = 10

_DEVICE_BYTES = 16 * MIB
#: Names of what is counted, as in results: unit, and what it may grow by.
COUNTED = ("slab_bytes", "open_files", "servers", "devices")


def counts() -> dict[str, int]:
    """What must not grow. "slab_bytes": the kernel's own objects, but for those that it
    drops when memory is short (SUnreclaim); "open_files" of this process.
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
    except OSError:  # it has ended, or is none: a kernel thread
        return False
    return program == str(helper_path(SERVER).resolve())


def slab_caches() -> dict[str, int]:
    """Bytes of each cache's living objects (slabinfo(5)); {} where it is hidden."""
    try:
        lines = Path("/proc/slabinfo").read_text().splitlines()[2:]
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {name: int(used) * int(size) for name, used, _, size, *_ in fields}


def cycle(front_end: FrontEndName, depth: int) -> dict[str, int]:
    """One device, read once, and gone again; nanoseconds of each part."""
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
    """So many devices are added by as many threads, all are read, all are removed."""
    all_there = threading.Barrier(devices, timeout=2 * _READY_TIMEOUT_S)
    moments: list[float] = []

    def one() -> str:
        try:
            with _device(front_end, depth) as server:
                all_there.wait()
                moments.append(time.monotonic())
                _check(server)
                # None goes before all were read while all were there.
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
    # What broke first explains why the others gave up waiting for it.
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
    """What has grown by more than it may, and by how much, for people."""
    allowed = {"slab_bytes": _SLACK_BYTES + cycles * _BYTES_PER_CYCLE}
    return {
        name: f"{name} grew by {after[name] - before[name]:,} in {cycles:,} cycles, "
        f"{allowed.get(name, 0):,} are allowed"
        for name in COUNTED
        if after[name] - before[name] > allowed.get(name, 0)
    }


def settled_counts() -> dict[str, int]:
    """counts(), once what is being freed has been."""
    time.sleep(_SETTLE_S)  # nothing tells of the end of a grace period
    return counts()


def run_cycles(
    front_end: FrontEndName, depth: int, *, cycles: int, stretches: int
) -> Iterator[Result]:
    """One result for each stretch of cycles; the last has what has grown since the
    warm-up.
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
    """Those that grew most, by how many bytes."""
    grown = {name: size - before.get(name, 0) for name, size in after.items()}
    most = sorted(grown.items(), key=lambda item: -item[1])[:_SHOWN_CACHES]
    return {name: by for name, by in most if by > 0}


def run_rounds(
    front_end: FrontEndName, depth: int, *, devices: int, rounds: int
) -> Iterator[Result]:
    """One result for each round; the last has what has grown since the first."""
    first: dict[str, int] | None = None
    for round_ in range(1, rounds + 1):
        result = at_once(front_end, depth, devices=devices)
        now = settled_counts()
        result |= {"what": "at once", "round": round_, "counts": now}
        first = first or now
        if round_ == rounds:
            result["growth"] = growth(first, now, cycles=devices * (rounds - 1))
        yield result


def tables(document: Document) -> list[Table]:
    """Stretches of cycles, rounds of many at once, and what grew."""
    groups = grouped(document["results"], lambda result: result["what"])
    made = []
    if "cycles" in groups:
        made.append(_cycles_table(groups["cycles"]))
    if "at once" in groups:
        made.append(_rounds_table(groups["at once"]))
    grown = [
        (result["what"], text)
        for result in document["results"]
        for text in result.get("growth", {}).values()
    ]
    if grown:
        made.append(Table("What grew", ("in", "what"), grown, left=2))
    return made


_COUNT_COLUMNS = ("slab KiB", "open files", "servers", "devices")


def _count_cells(result: Result) -> tuple[str, ...]:
    kept = result["counts"]
    return number(kept["slab_bytes"] / KIB), *(
        number(kept[name]) for name in COUNTED[1:]
    )


def _cycles_table(results: list[Result]) -> Table:
    caches = results[-1].get("caches", {})
    note = ", ".join(f"{name} {by / KIB:,.0f} KiB" for name, by in caches.items())
    return Table(
        "One device after another",
        ("cycles", "add ms", "p99", "read ms", "remove ms", "p99", *_COUNT_COLUMNS),
        [
            (
                number(result["cycles"]),
                *_milliseconds(result["times"]["add"], "p50_us", "p99_us"),
                *_milliseconds(result["times"]["read"], "p50_us"),
                *_milliseconds(result["times"]["remove"], "p50_us", "p99_us"),
                *_count_cells(result),
            )
            for result in results
        ],
        note="Medians of the cycles since the row above. Slab: what the kernel cannot "
        f"drop. Caches that grew most since the warm-up: {note or 'none'}.",
    )


def _milliseconds(record: Mapping[str, float], *names: str) -> tuple[str, ...]:
    return tuple(number(record[name] / 1e3, 1) for name in names)


def _rounds_table(results: list[Result]) -> Table:
    return Table(
        f"{results[0]['devices_at_once']} devices at once",
        ("round", "add s", "remove s", *_COUNT_COLUMNS),
        [
            (
                number(result["round"]),
                number(result["add_s"], 2),
                number(result["remove_s"], 2),
                *_count_cells(result),
            )
            for result in results
        ],
        note="Until all are there, and until all are gone; counted after that.",
    )


@click.command(context_settings=options.SETTINGS)
@click.option("--cycles", type=click.IntRange(min=20), default=1000)
@click.option("--at-once", type=click.IntRange(0, 256), default=32)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, help="Of many at once."
)
@click.option("--front-end", type=click.Choice(["ublk", "fuse"]), default="ublk")
@click.option("--depth", type=options.COUNT, default=4, help="Of each device's queue.")
@options.common_options()
def command(
    cycles: int,
    at_once: int,
    rounds: int,
    front_end: FrontEndName,
    depth: int,
    parent: Path,
    patience_s: float,
    as_json: bool,
) -> int:
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
    for result in run_cycles(front_end, depth, cycles=cycles, stretches=_STRETCHES):
        document["results"].append(result)
        options.progress(f"{result['cycles']} cycles")
    if at_once:
        for result in run_rounds(front_end, depth, devices=at_once, rounds=rounds):
            document["results"].append(result)
            options.progress(f"round {result['round']} of {rounds}")
    finish(document, as_json=as_json)
    return int(any(result.get("growth") for result in document["results"]))


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.device_cycles")
