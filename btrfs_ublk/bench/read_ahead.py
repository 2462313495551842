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

from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import wait_until_quiet, watched
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.stats import grouped, median_of
from btrfs_ublk.capabilities import BTRFS, LOOP, ROOT, require
from btrfs_ublk.entry import run_command
from btrfs_ublk.resources.read_ahead import set_read_ahead
from btrfs_ublk.resources.tempdir import tempdir
from btrfs_ublk.server import BlockServer, FrontEndName, MemsetSegment, ServerStats
from btrfs_ublk.units import BLOCK_BYTES, MIB, format_size
from btrfs_ublk.volume import Volume, volume

#: The kernel gives up reading around faults after 100 in a file that all missed.
_FAULTS_PER_OPEN = 50
#: Faults are so far apart that none finds what another one fetched.
_APART_BYTES = 8 * MIB
_BYTE = 97


def _read_bytes(server: BlockServer) -> int:
    return ServerStats.parse(server.stats()).kinds["memset"].read_bytes


def _drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def fault(path: Path, offsets: Sequence[int]) -> None:
    """Touch one page at each offset of a mapping; few enough for one open file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            for offset in offsets:
                assert memory[offset] == _BYTE
    finally:
        os.close(fd)


def read_all(path: Path) -> None:
    """From start to end, through the page cache."""
    buffer = bytearray(MIB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure_faults(
    made: Volume, path: Path, *, count: int, chances: random.Random
) -> Result:
    """Faults per second, one after the other, and bytes that each fetched."""
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
    """Bytes per second of one reader, and how many were fetched per byte read."""
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
    """One row for each size: medians of the turns."""
    rows = []
    for size, turns in grouped(
        document["results"], lambda result: result["read_ahead_bytes"]
    ).items():
        rows.append(
            (
                format_size(size),
                str(len(turns)),
                number(median_of(turns, "faults_per_s")),
                number(median_of(turns, "bytes_per_fault") / 1024, 1),
                number(median_of(turns, "bytes_per_s") / MIB),
                number(median_of(turns, "fetched_per_byte"), 2),
                number(median_of(turns, "load"), 1),
            )
        )
    columns = (
        *("read-ahead", "turns", "faults/s", "KiB each"),
        *("seq. MiB/s", "fetched", "load"),
    )
    return [
        Table(
            "Page faults at random, and a file read from start to end",
            columns,
            rows,
            note="Medians; one reader of a clone of memset data. Fetched: bytes that "
            "the server delivered, per byte that was read.",
        )
    ]


@click.command(context_settings=options.SETTINGS)
@click.option(
    "--read-ahead",
    "sizes",
    multiple=True,
    default=("4M", "1M", "512K", "256K", "128K", "64K", "32K"),
    callback=options.parse_sizes,
    help="May be given many times.",
)
@click.option(
    "--front-end", type=click.Choice(["auto", "fuse", "ublk"]), default="auto"
)
@click.option(
    "--size",
    "size_bytes",
    default="1G",
    callback=options.parse_sizes,
    help="Of the file; a turn caches all of it.",
)
@click.option("--faults", type=options.COUNT, default=200, help="In each turn.")
@options.common_options(repeats=5)
def command(
    sizes: Sequence[int],
    front_end: FrontEndName,
    size_bytes: int,
    faults: int,
    repeats: int,
    parent: Path,
    patience_s: float,
    as_json: bool,
) -> None:
    """Read a clone of memset data on a sprout with each size of read-ahead: page faults
    at random, then all of it in order.
    """
    require(ROOT, BTRFS, LOOP)
    least = _FAULTS_PER_OPEN * _APART_BYTES
    if size_bytes < least:
        raise click.UsageError(f"--size must be {format_size(least)} or more")
    document = make_document(
        "read_ahead",
        parameters={"front_end": front_end, "size_bytes": size_bytes, "faults": faults},
        directory=parent,
        results=[],
    )
    memset = MemsetSegment(offset=0, length=size_bytes, byte=_BYTE)
    chances = random.Random(1)
    with tempdir(parent=parent) as directory:
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
            for turn in range(1, repeats + 1):
                for size in sizes:
                    wait_until_quiet(timeout_s=patience_s)
                    set_read_ahead(target, size)
                    with watched() as busy:
                        result: Result = {"read_ahead_bytes": size, "turn": turn}
                        result |= measure_faults(
                            made, path, count=faults, chances=chances
                        )
                        result |= measure_sequential(made, path)
                    document["results"].append(result | {"load": busy["load"]})
                options.progress(f"turn {turn} of {repeats}")
    finish(document, as_json=as_json)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.read_ahead")
