"""The time to make a seed, to mount it, and to turn it into a sprout.

``python -m btrfs_ublk.bench.seed --help``
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Helper
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import MKSEED
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench.file_systems import forgotten
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, study, table
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.btrfs import add_device
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.seed import Seed, make_seed
from btrfs_ublk.units import (
    BLOCK_BYTES,
    EIB,
    GIB,
    MIB,
    TIB,
    format_size,
    parse_block_size,
)
from btrfs_ublk.volume.virtual_file import assert_mapping, virtual_file_of

#: Its file is sparse: only written data take memory.
_WRITABLE_BYTES = 16 * GIB
#: The timed steps in order: name in a result, and in the table.
STEPS = {
    "make_s": "make",
    "mount_s": "mount",
    "validate_s": "validate",
    "add_s": "device add",
    "remount_rw_s": "remount rw",
    "unmount_s": "unmount",
    "mount_sprout_s": "sprout mount",
}


class SeedSize(NamedTuple):
    """Sizes in bytes; with None, chunks are as long as possible."""

    virtual_data_size: int
    chunk_bytes: int | None = None


def parse_seed_sizes(
    _context: click.Context, parameter: click.Parameter, value: Sequence[str]
) -> list[SeedSize]:
    """Parse virtual data and, after a colon, the length of chunks: "4E", "4T:4G"."""
    what, found = parameter.opts[-1], []
    for text in value:
        size, colon, chunk = text.partition(":")
        chunk_bytes = (
            parse_block_size(chunk, what=f"chunk of {what}") if colon else None
        )
        found.append(SeedSize(parse_block_size(size, what=what), chunk_bytes))
    return found


def seed_name(virtual_data_bytes: int) -> str:
    """Format like the table of sizes: "275 GiB", "4 EiB"; never rounded."""
    for unit, letter in ((EIB, "EiB"), (TIB, "TiB")):
        if virtual_data_bytes % unit == 0:
            return f"{virtual_data_bytes // unit} {letter}"
    return format_size(virtual_data_bytes)


class Stopwatch:
    """``lap()`` returns the seconds since the last call."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def lap(self) -> float:
        now_s = time.monotonic()
        lap_s, self._last_s = now_s - self._last_s, now_s
        return lap_s


def measure(kind: SeedSize, *, parent: Path) -> Result:
    """Measure one turn: each step once, on a new seed. Seconds, and bytes."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempdir(parent=parent))
        target = directory / "mount"
        target.mkdir()
        watch = Stopwatch()
        seed = make_seed(
            directory / "seed.img",
            virtual_data_size=kind.virtual_data_size,
            chunk_bytes=kind.chunk_bytes,
        )
        result: Result = {
            "virtual_data_size": kind.virtual_data_size,
            "chunks": seed.chunks,
            "stub_chunk": seed.stub_chunk,
            "load": os.getloadavg()[0],
            "make_s": watch.lap(),
            "allocated_bytes": seed.path.stat().st_blocks * 512,
            "metadata_bytes": seed.metadata_bytes,
        }
        with (directory / "writable.img").open("xb") as file:
            file.truncate(_WRITABLE_BYTES)
        below = stack.enter_context(loop_device(seed.path, read_only=True)).path
        local = stack.enter_context(loop_device(directory / "writable.img")).path
        stack.enter_context(forgotten(local))
        # For a small file system, most of mount(8)'s time is its own start.
        watch.lap()
        run_program(["mount", "--version"], timeout_s=20)
        result["start_s"] = watch.lap()
        option = [f"device={below}"]
        with mounted(below, target, options=option, read_only=True) as mount:
            result["mount_s"] = watch.lap()
            assert_mapping(seed, target)
            result["validate_s"] = watch.lap()
            mount.allow_source(local)
            add_device(target, local)
            result["add_s"] = watch.lap()
            mount.remount(options=["rw"])
            result["remount_rw_s"] = watch.lap()
            _prove(target, seed)
            watch.lap()
        result["unmount_s"] = watch.lap()
        with mounted(local, target, options=option):
            result["mount_sprout_s"] = watch.lap()
            if (target / "clone").stat().st_size != BLOCK_BYTES:
                raise BtrfsUblkError("the sprout lost its clone")
    return result


def _prove(target: Path, seed: Seed) -> None:
    """Prove that it is a sprout: a clone of the last block reads correctly."""
    clone, offset = target / "clone", seed.virtual_data.size - BLOCK_BYTES
    with virtual_file_of(seed, target) as source:
        clone_file(source, clone, source_offset=offset, size_bytes=BLOCK_BYTES)
    if clone.read_bytes() != bytes(BLOCK_BYTES):
        raise BtrfsUblkError("a clone of virtual data does not read as zeroes")


_NAMES = {
    "virtual data": lambda x: seed_name(x["virtual_data_size"]),
    "chunks": lambda x: f"{x['chunks']:,}{' + stub' if x['stub_chunk'] else ''}",
}


def tables(document: Document) -> list[Table]:
    """Make a table of milliseconds of each step: medians, and the best."""
    steps = [(head, key) for key, head in STEPS.items()]
    return [
        table(
            "Seeds and sprouts: milliseconds, median (best)",
            document["results"],
            _NAMES,
            [
                TURNS,
                Column("MiB", "allocated_bytes", 2, 1 / MIB),
                *(
                    Column(head, key, 1, 1e3, best=True)
                    for head, key in (*steps, ("start", "start_s"))
                ),
                LOAD,
            ],
            left=2,
            note="MiB: what the image takes of its file system. Start: what running "
            "mount(8) takes in any case, part of both mounts and the remount.",
        )
    ]


@study(
    "seed",
    click.option(
        *("--seed", "seeds"),
        multiple=True,
        default=("275G", "250T", "4E", "4E:128T"),
        callback=parse_seed_sizes,
        metavar="SIZE[:CHUNK]",
        help="Virtual data, and the length of its chunks.",
    ),
    needs=(ROOT, BTRFS, LOOP, Helper(MKSEED)),
    repeats=11,
)
def command(run: Run, seeds: Sequence[SeedSize]) -> None:
    """Time each step from nothing to a sprout, for seeds of several sizes."""
    for _ in run.turns(tell=True):
        for kind in seeds:
            run.wait_until_quiet()
            run.add(measure(kind, parent=run.parent))


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.seed")
