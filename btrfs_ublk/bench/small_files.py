"""How fast ordinary small files are written on a sprout, compared with a plain btrfs.

An ordinary write walks the list of data block groups, which is long on a sprout of a
seed with thousands of chunks. A stub chunk in the seed shortens that list.

``python -m btrfs_ublk.bench.small_files --help``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import click

from btrfs_ublk.base.capabilities import (
    BTRFS,
    LOOP,
    MKFS_BTRFS,
    ROOT,
    Helper,
    require,
)
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import MAKE_FILES, MKSEED
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import QUIET_NOTE
from btrfs_ublk.bench.files import Plan, make_files, sync_file_system
from btrfs_ublk.bench.report import Document, Result, Table, number
from btrfs_ublk.bench.sprouts import bed, plain_btrfs
from btrfs_ublk.bench.stats import median_of
from btrfs_ublk.bench.study import (
    QUIET_TURNS,
    Column,
    QuietColumn,
    Run,
    quiet,
    study,
    table,
)
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import GIB, MIB, format_size

PLAIN, PLAIN_NODATACOW = "plain", "plain, nodatacow"
#: The most that the helper writes into one file.
_MAX_FILE_BYTES = MIB
_SAMPLES = 500
#: Ratios are to this one.
_REFERENCE = PLAIN_NODATACOW


@contextmanager
def file_system(
    kind: str | options.SeedSize, *, parent: Path, writable_bytes: int
) -> Iterator[tuple[Path, Result]]:
    """Yield a new, mounted, writable file system, and its part of a result."""
    if isinstance(kind, str):
        nodatacow = kind == PLAIN_NODATACOW
        with plain_btrfs(
            parent, nodatacow=nodatacow, writable_bytes=writable_bytes
        ) as mount:
            yield mount.target, {"file_system": kind, "chunks": 0, "stub_chunk": False}
        return
    size, chunk_bytes = kind
    with bed(
        parent,
        virtual_data_size=size,
        chunk_bytes=chunk_bytes,
        writable_bytes=writable_bytes,
    ) as place:
        with place.sprouted() as made:
            yield made.target, {
                "file_system": f"sprout of {options.seed_name(size)}",
                "chunks": place.seed.chunks,
                "stub_chunk": place.seed.stub_chunk,
            }


def measure(
    kind: str | options.SeedSize,
    *,
    parent: Path,
    files: int,
    fsync_files: int,
    file_bytes: int,
    writable_bytes: int,
    processes: int,
) -> Result:
    """Measure one turn on a new file system: files flushed together at the end, and
    files with an fsync each.
    """
    with file_system(kind, parent=parent, writable_bytes=writable_bytes) as (
        target,
        about,
    ):
        written, synced = target / "written", target / "synced"
        written.mkdir()
        synced.mkdir()
        sync_file_system(target)
        plan = Plan([0] * files, [file_bytes] * files)
        outcome = make_files(written, plan, operation="write", processes=processes)
        sync_s = sync_file_system(target)
        _verify(written, plan, processes=processes)
        result: Result = {
            **about,
            **outcome.record(),
            "file_bytes": file_bytes,
            "writable_bytes": writable_bytes,
            "sync_s": sync_s,
            "flush_us": sync_s * 1e6 / files,
            "rate_with_sync": files / (outcome.wall_s + sync_s),
        }
        if fsync_files:
            plan = Plan([0] * fsync_files, [file_bytes] * fsync_files)
            outcome = make_files(
                synced, plan, operation="write-fsync", processes=processes
            )
            _verify(synced, plan, processes=processes)
            result["fsync"] = outcome.record()
    return result


def content(file_bytes: int) -> bytes:
    """Return what the helper writes, see set_up() in csrc/bench/make-files.c."""
    mask = (1 << 64) - 1
    return bytes((i * 2654435761 & mask) >> 13 & 0xFF for i in range(file_bytes))


def _verify(directory: Path, plan: Plan, *, processes: int) -> None:
    """Read some files from the device. Raises BtrfsUblkError for wrong data."""
    wanted = content(plan[0].size)
    for file in plan.sample(_SAMPLES):
        path = plan.path(directory, file.number, processes=processes)
        if path.stat().st_size != file.size or (
            read_direct(path, 0, file.size) != wanted
        ):
            raise BtrfsUblkError(f"{path} is not what was written")


_WHERE: dict[str, Callable[[Result], str]] = {
    "device": lambda x: options.seed_name(x["writable_bytes"]),
    "processes": lambda x: number(x["processes"]),
}
_NAMES: dict[str, Callable[[Result], str]] = {
    "file system": lambda x: str(x["file_system"]),
    "chunks": lambda x: (f"{x['chunks']:,}" if x["chunks"] else "-")
    + (" + stub" if x["stub_chunk"] else ""),
    **_WHERE,
}


def _fsync(results: Sequence[Result]) -> list[Result]:
    """Return the results of files with an fsync each."""
    return [result | result["fsync"] for result in results if "fsync" in result]


def _rates(results: Sequence[Result], rate: str) -> list[Column]:
    """Make columns of turns and rates, also as a ratio to the reference on the same
    device with as many processes.
    """

    def where(result: Result) -> list[str]:
        return [name(result) for name in _WHERE.values()]

    def ratio(turns: Sequence[Result]) -> float:
        same = [
            each
            for each in results
            if each["file_system"] == _REFERENCE and where(each) == where(turns[0])
        ]
        return median_of(quiet(turns), rate) / median_of(quiet(same), rate)

    return [
        QUIET_TURNS,
        QuietColumn("median/s", rate),
        Column("best/s", lambda turns: max(turn[rate] for turn in turns)),
        Column("ratio", ratio, 2),
    ]


def tables(document: Document) -> list[Table]:
    """Make tables of rates, and of ratios to a plain btrfs without checksums."""
    results = document["results"]
    size = format_size(results[0]["file_bytes"])
    note = (
        f"{QUIET_NOTE} Ratio: of the median to that of plain btrfs with nodatacow, "
        "which new files on a sprout have as well."
    )
    noise = [
        QuietColumn("other cores", "other_cores", 2),
        QuietColumn("load", "load", 1),
    ]
    made = [
        table(
            f"New files of {size}, {results[0]['files']:,} of them, flushed by one "
            "syncfs",
            results,
            _NAMES,
            [
                *_rates(results, "rate_with_sync"),
                QuietColumn("write/s", "rate"),
                QuietColumn("flush us", "flush_us", 1),
                QuietColumn("p50", "p50_us", 1),
                QuietColumn("p99", "p99_us"),
                QuietColumn("CPU us", "cpu_us", 1),
                *noise,
            ],
            left=2,
            note=note + " Median, best and ratio include the syncfs. Write/s: without "
            "it. Flush us: its time per file. Latencies of writing, in us.",
        )
    ]
    if synced := _fsync(results):
        made.append(
            table(
                f"New files of {size}, {synced[0]['files']:,} of them, each with an "
                "fsync",
                synced,
                _NAMES,
                [
                    *_rates(synced, "rate"),
                    QuietColumn("p50", "p50_us"),
                    QuietColumn("p99", "p99_us"),
                    *noise,
                ],
                left=2,
                note=note,
            )
        )
    return made


@study(
    "small_files",
    click.option("--files", type=options.COUNT, default=50_000, help="Per turn."),
    options.sizes_option("--file-size", "file_bytes", default="16K", help="Up to 1M."),
    click.option(
        "--fsync-files",
        type=click.IntRange(min=0),
        default=2_000,
        help="Further files, each with an fsync.",
    ),
    options.seeds_option(
        *("275G", "4E", "4092G:4G", "4T:4G"),
        help="Virtual data, and the length of its chunks: from 1,024 on with a stub.",
    ),
    options.sizes_option(
        *("--writable-size", "writable_sizes"),
        default=("16G", "1T"),
        help="The (sparse) device that is written to; btrfs flushes at a share of it.",
    ),
    options.processes_option,
    click.option("--plain/--no-plain", default=True, help="Measure that, too."),
    needs=(ROOT, BTRFS, LOOP, Helper(MKSEED), Helper(MAKE_FILES)),
    repeats=5,
    recorded=("files", "fsync_files"),
)
def command(
    run: Run,
    files: int,
    file_bytes: int,
    fsync_files: int,
    seeds: Sequence[options.SeedSize],
    writable_sizes: Sequence[int],
    processes: Sequence[int],
    plain: bool,
) -> None:
    """Write new small files on sprouts and on plain btrfs file systems.

    Seeds, sizes and numbers of processes may be given more than once.

    Each turn makes all file systems anew, one after the other, so that what else the
    machine does meets them alike.
    """
    if file_bytes > _MAX_FILE_BYTES:
        raise UsageError(f"--file-size: {format_size(_MAX_FILE_BYTES)} at most")
    if min(writable_sizes) < GIB:
        raise UsageError("--writable-size: 1G at least")
    if max(processes) > min(files, fsync_files or files):
        raise UsageError("--processes: more than there are files")
    kinds: list[str | options.SeedSize] = list(seeds)
    if plain:
        require(MKFS_BTRFS)
        kinds = [PLAIN, PLAIN_NODATACOW, *kinds]
    for turn in run.turns():
        for writable_bytes, count, kind in product(writable_sizes, processes, kinds):
            run.wait_until_quiet()
            result = measure(
                kind,
                parent=run.parent,
                files=files,
                fsync_files=fsync_files,
                file_bytes=file_bytes,
                writable_bytes=writable_bytes,
                processes=count,
            )
            run.add(result)
            options.progress(
                f"turn {turn}: {' '.join(name(result) for name in _NAMES.values())}: "
                f"{result['rate_with_sync']:,.0f}/s, load {result['load']:.1f}"
            )


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.small_files")
