"""How far to read ahead: what page faults and sequential reads cost and fetch.

``python -m btrfs_ublk.bench.read_ahead --help``
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import click

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import watched
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, study, table
from btrfs_ublk.kernel.read_ahead import set_read_ahead
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import BlockServer, FrontEndName, MemsetSegment
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB, format_size
from btrfs_ublk.volume.temporary import Volume, volume

#: The kernel stops reading around faults after 100 misses in an open file.
_FAULTS_PER_OPEN = 50
#: This is so far that no fault finds what another one fetched.
_APART_BYTES = 8 * MIB
_BYTE = 97


def _read_bytes(server: BlockServer) -> int:
    return server.stats().kinds["memset"].read_bytes


def _drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def fault(path: Path, offsets: Sequence[int]) -> None:
    """Touch one page at each offset; these must be few enough for one open file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            for offset in offsets:
                assert memory[offset] == _BYTE
    finally:
        os.close(fd)


def read_all(path: Path) -> None:
    """Read a file from start to end, through the page cache."""
    buffer = bytearray(MIB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure_faults(
    made: Volume, path: Path, *, count: int, chances: random.Random
) -> Result:
    """Measure successive faults per second, and the bytes that each fetched."""
    slots = path.stat().st_size // _APART_BYTES
    seconds = 0.0
    before = _read_bytes(made.server)
    for _ in range(-(-count // _FAULTS_PER_OPEN)):
        _drop_cache(path)
        chosen = chances.sample(range(slots), _FAULTS_PER_OPEN)
        offsets = [
            slot * _APART_BYTES
            + _APART_BYTES // 2
            + chances.randrange(256) * BLOCK_BYTES
            for slot in chosen
        ]
        start_s = time.perf_counter()
        fault(path, offsets)
        seconds += time.perf_counter() - start_s
    faults = -(-count // _FAULTS_PER_OPEN) * _FAULTS_PER_OPEN
    fetched = _read_bytes(made.server) - before
    return {"faults_per_s": faults / seconds, "bytes_per_fault": fetched / faults}


def measure_sequential(made: Volume, path: Path) -> Result:
    """Measure bytes per second of one reader, and bytes fetched per byte read."""
    size_bytes = path.stat().st_size
    _drop_cache(path)
    before = _read_bytes(made.server)
    start_s = time.perf_counter()
    read_all(path)
    seconds = time.perf_counter() - start_s
    fetched = _read_bytes(made.server) - before
    return {
        "bytes_per_s": size_bytes / seconds,
        "fetched_per_byte": fetched / size_bytes,
    }


def tables(document: Document) -> list[Table]:
    """Make a table with one row for each size: medians of the turns."""
    return [
        table(
            "Page faults at random, and a file read from start to end",
            document["results"],
            {"read-ahead": lambda x: format_size(x["read_ahead_bytes"])},
            [
                TURNS,
                Column("faults/s", "faults_per_s"),
                Column("KiB each", "bytes_per_fault", 1, 1 / KIB),
                Column("seq. MiB/s", "bytes_per_s", 0, 1 / MIB),
                Column("fetched", "fetched_per_byte", 2),
                LOAD,
            ],
            note="Medians; one reader of a clone of memset data. Fetched: bytes that "
            "the server delivered, per byte that was read.",
        )
    ]


@study(
    "read_ahead",
    options.sizes_option(
        *("--read-ahead", "sizes"),
        default=("4M", "1M", "512K", "256K", "128K", "64K", "32K"),
        help="May be given many times.",
    ),
    options.front_end_option,
    options.size_option("1G", help="Of the file; a turn caches all of it."),
    click.option("--faults", type=options.COUNT, default=200, help="In each turn."),
    needs=(ROOT, BTRFS, LOOP),
    repeats=5,
    recorded=("front_end", "size_bytes", "faults"),
)
def command(
    run: Run,
    sizes: Sequence[int],
    front_end: FrontEndName,
    size_bytes: int,
    faults: int,
) -> None:
    """Read a clone of memset data on a sprout with each size of read-ahead: page faults
    at random, then all of it in order.
    """
    least = _FAULTS_PER_OPEN * _APART_BYTES
    if size_bytes < least:
        raise click.UsageError(f"--size must be {format_size(least)} or more")
    memset = MemsetSegment(offset=0, length=size_bytes, byte=_BYTE)
    chances = random.Random(1)
    with tempdir(parent=run.parent) as directory:
        target = directory / "mnt"
        target.mkdir()
        with volume(
            target,
            [memset],
            virtual_data_size=size_bytes,
            parent=directory,
            front_end=front_end,
        ) as made:
            path = made.clone("clone", offset=0, size_bytes=size_bytes)
            for turn in run.turns(tell=True):
                for size in sizes:
                    run.wait_until_quiet()
                    set_read_ahead(target, size)
                    with watched() as busy:
                        result: Result = {"read_ahead_bytes": size, "turn": turn}
                        result |= measure_faults(
                            made, path, count=faults, chances=chances
                        )
                        result |= measure_sequential(made, path)
                    run.add(result | {"load": busy["load"]})


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.read_ahead")
