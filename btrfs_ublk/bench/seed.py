"""What it takes to make a seed, to mount it, and to turn it into a sprout.

``python -m btrfs_ublk.bench.seed --help``
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import wait_until_quiet
from btrfs_ublk.bench.report import (
    Document,
    Highlight,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.sprouts import WRITABLE_BYTES, Stopwatch
from btrfs_ublk.bench.stats import grouped, median_of
from btrfs_ublk.capabilities import BTRFS, LOOP, ROOT, Helper, require
from btrfs_ublk.entry import run_command
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.helpers import MKSEED
from btrfs_ublk.process import run
from btrfs_ublk.resources.btrfs import add_device, forget_device
from btrfs_ublk.resources.loop import loop_device
from btrfs_ublk.resources.mount import mounted
from btrfs_ublk.resources.reflink import clone_file
from btrfs_ublk.resources.tempdir import tempdir
from btrfs_ublk.seed import make_seed
from btrfs_ublk.units import BLOCK_BYTES, MIB
from btrfs_ublk.volume import assert_mapping

#: The steps that are timed, in their order: name in a result, and in the table.
STEPS = {
    "make_s": "make",
    "mount_s": "mount",
    "validate_s": "validate",
    "add_s": "device add",
    "remount_rw_s": "remount rw",
    "unmount_s": "unmount",
    "mount_sprout_s": "sprout mount",
}


def measure(kind: options.SeedSize, *, parent: Path) -> Result:
    """One turn: each step once, on a new seed. Seconds, and bytes."""
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
            file.truncate(WRITABLE_BYTES)
        below = stack.enter_context(loop_device(seed.path, read_only=True)).path
        local = stack.enter_context(loop_device(directory / "writable.img")).path
        stack.callback(_forget, local)
        # Most of what mount(8) takes for a small file system is its own start.
        watch.lap()
        run(["mount", "--version"], timeout_s=20)
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
            _prove(target, seed.virtual_data.filename)
            watch.lap()
        result["unmount_s"] = watch.lap()
        with mounted(local, target, options=option):
            result["mount_sprout_s"] = watch.lap()
            if (target / "clone").stat().st_size != BLOCK_BYTES:
                raise BtrfsUblkError("the sprout lost its clone")
    return result


def _prove(target: Path, name: str) -> None:
    """That it is a sprout: a clone of the last block reads as it should."""
    source = target / name
    offset = source.stat().st_size - BLOCK_BYTES
    clone_file(source, target / "clone", source_offset=offset, size_bytes=BLOCK_BYTES)
    if (target / "clone").read_bytes() != bytes(BLOCK_BYTES):
        raise BtrfsUblkError("a clone of virtual data does not read as zeroes")


def _forget(device: Path) -> None:
    with suppress(BtrfsUblkError):
        forget_device(device)


def _columns(result: Result) -> tuple[str, str]:
    stub = " + stub" if result["stub_chunk"] else ""
    return (
        options.seed_name(result["virtual_data_size"]),
        f"{result['chunks']:,}{stub}",
    )


def tables(document: Document) -> list[Table]:
    """Milliseconds of each step: medians, and the best."""
    groups = grouped(document["results"], _columns)
    rows = []
    for columns, results in groups.items():
        times = [
            f"{number(median_of(results, name) * 1e3, 1)} "
            f"({number(min(result[name] for result in results) * 1e3, 1)})"
            for name in (*STEPS, "start_s")
        ]
        allocated = median_of(results, "allocated_bytes") / MIB
        rows.append(
            (
                *columns,
                str(len(results)),
                number(allocated, 2),
                *times,
                number(median_of(results, "load"), 1),
            )
        )
    return [
        Table(
            "Seeds and sprouts: milliseconds, median (best)",
            (
                *("virtual data", "chunks", "turns", "MiB"),
                *(*STEPS.values(), "start", "load"),
            ),
            rows,
            2,
            "MiB: what the image takes of its file system. Start: what running "
            "mount(8) takes in any case, part of both mounts and the remount.",
        )
    ]


def highlights(document: Document) -> list[Highlight]:
    """Of the largest seed."""
    groups = grouped(document["results"], lambda each: each["virtual_data_size"])
    if not groups:
        return []
    size = max(groups)
    # Of several lengths of chunks, the first.
    first = _columns(groups[size][0])
    its = [result for result in groups[size] if _columns(result) == first]
    mount_ms = median_of(its, "mount_sprout_s") * 1e3
    return [
        Highlight(
            f"{number(median_of(its, 'make_s') * 1e3, 1)} ms",
            f"To make the seed of {options.seed_name(size)}",
            f"It takes {number(median_of(its, 'allocated_bytes') / MIB, 1)} MiB; its "
            f"sprout is mounted in {number(mount_ms, 1)} ms.",
        )
    ]


@click.command(context_settings=options.SETTINGS)
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    default=("275G", "250T", "4E", "4E:128T"),
    callback=options.parse_seed_sizes,
    metavar="SIZE[:CHUNK]",
    help="Virtual data, and the length of its chunks.",
)
@options.common_options(repeats=11)
def command(
    seeds: Sequence[options.SeedSize],
    repeats: int,
    parent: Path,
    patience_s: float,
    as_json: bool,
) -> None:
    """Time each step from nothing to a sprout, for seeds of several sizes."""
    require(ROOT, BTRFS, LOOP, Helper(MKSEED))
    document = make_document("seed", parameters={}, directory=parent, results=[])
    for turn in range(1, repeats + 1):
        for kind in seeds:
            wait_until_quiet(timeout_s=patience_s)
            document["results"].append(measure(kind, parent=parent))
        options.progress(f"turn {turn} of {repeats}")
    finish(document, as_json=as_json)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.seed")
