"""How fast ordinary small files are written on a sprout, compared with a plain btrfs.

An ordinary write walks the list of data block groups, which is long on a sprout of a
seed with thousands of chunks; a stub chunk in the seed makes that list short again.

``python -m btrfs_ublk.bench.small_files --help``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import QUIET_CORES, QUIET_NOTE, wait_until_quiet
from btrfs_ublk.bench.files import Plan, make_files, sync_file_system
from btrfs_ublk.bench.report import (
    Document,
    Highlight,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.sprouts import bed, plain_btrfs
from btrfs_ublk.bench.stats import grouped, median_of, undisturbed
from btrfs_ublk.capabilities import (
    BTRFS,
    LOOP,
    MKFS_BTRFS,
    ROOT,
    Helper,
    require,
)
from btrfs_ublk.entry import run_command
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.helpers import MAKE_FILES, MKSEED
from btrfs_ublk.readers import read_direct
from btrfs_ublk.units import GIB, MIB, format_size

PLAIN, PLAIN_NODATACOW = "plain", "plain, nodatacow"
#: What the helper writes at most into one file.
_MAX_FILE_BYTES = MIB
_SAMPLES = 500
#: What the ratios are of.
_REFERENCE = PLAIN_NODATACOW


@contextmanager
def file_system(
    kind: str | options.SeedSize, *, parent: Path, writable_bytes: int
) -> Iterator[tuple[Path, Result]]:
    """A mounted, writable, new file system, and what a result says about it."""
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
    """One turn on a new file system: written and then flushed as a whole; and written
    with an fsync each.
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
    """What the helper writes, see set_up() in csrc/bench/make-files.c."""
    mask = (1 << 64) - 1
    return bytes((i * 2654435761 & mask) >> 13 & 0xFF for i in range(file_bytes))


def _verify(directory: Path, plan: Plan, *, processes: int) -> None:
    """Read some of the files from the device; raises BtrfsUblkError."""
    wanted = content(plan[0].size)
    for file in plan.sample(_SAMPLES):
        path = plan.path(directory, file.number, processes=processes)
        if path.stat().st_size != file.size or (
            read_direct(path, 0, file.size) != wanted
        ):
            raise BtrfsUblkError(f"{path} is not what was written")


def _columns(result: Result) -> tuple[str, ...]:
    chunks = f"{result['chunks']:,}" if result["chunks"] else "-"
    return (
        result["file_system"],
        chunks + (" + stub" if result["stub_chunk"] else ""),
        *_circumstances(result),
    )


def _circumstances(result: Result) -> tuple[str, str]:
    """What has to be the same for a ratio to mean something."""
    return options.seed_name(result["writable_bytes"]), number(result["processes"])


def _quiet(results: Sequence[Result]) -> tuple[Sequence[Result], str]:
    """What medians are of, and how many of the turns those are."""
    quiet = undisturbed(results, most_cores=QUIET_CORES)
    return quiet or results, f"{len(quiet)} of {len(results)}"


def _fsync(results: Sequence[Result]) -> list[Result]:
    return [result["fsync"] for result in results if "fsync" in result]


def tables(document: Document) -> list[Table]:
    """Rates, and how many times that of a plain btrfs without checksums."""
    groups = grouped(document["results"], _columns)
    plain = grouped(
        (each for each in document["results"] if each["file_system"] == _REFERENCE),
        _circumstances,
    )
    rows, synced_rows = [], []
    for columns, all_results in groups.items():
        best = max(result["rate_with_sync"] for result in all_results)
        results, turns = _quiet(all_results)
        same = plain.get(_circumstances(results[0]), [])
        reference, fsync_reference = _quiet(same)[0], _quiet(_fsync(same))[0]
        median = median_of(results, "rate_with_sync")
        rows.append(
            (
                *columns,
                turns,
                number(median),
                number(best),
                number(median / median_of(reference, "rate_with_sync"), 2),
                number(median_of(results, "rate")),
                number(median_of(results, "flush_us"), 1),
                number(median_of(results, "p50_us"), 1),
                number(median_of(results, "p99_us"), 0),
                number(median_of(results, "cpu_us"), 1),
                number(median_of(results, "other_cores"), 2),
                number(median_of(results, "load"), 1),
            )
        )
        all_synced = _fsync(all_results)
        if all_synced:
            synced, turns = _quiet(all_synced)
            rate = median_of(synced, "rate")
            synced_rows.append(
                (
                    *columns,
                    turns,
                    number(rate),
                    number(max(result["rate"] for result in all_synced)),
                    number(rate / median_of(fsync_reference, "rate"), 2),
                    number(median_of(synced, "p50_us"), 0),
                    number(median_of(synced, "p99_us"), 0),
                    number(median_of(synced, "other_cores"), 2),
                    number(median_of(synced, "load"), 1),
                )
            )
    first = document["results"][0]
    size = format_size(first["file_bytes"])
    head = (
        "file system",
        "chunks",
        "device",
        "processes",
        "quiet",
        "median/s",
        "best/s",
        "ratio",
    )
    note = (
        f"{QUIET_NOTE} Ratio: of the median to that of plain btrfs with nodatacow, "
        "which new files on a sprout have as well."
    )
    made = [
        Table(
            f"New files of {size}, {first['files']:,} of them, flushed by one syncfs",
            (
                *head,
                "write/s",
                "flush us",
                "p50",
                "p99",
                "CPU us",
                "other cores",
                "load",
            ),
            rows,
            2,
            note + " Median, best and ratio include the syncfs. Write/s: without it. "
            "Flush us: its time per file. Latencies of writing, in us.",
        )
    ]
    if synced_rows:
        count = _fsync(document["results"])[0]["files"]
        made.append(
            Table(
                f"New files of {size}, {count:,} of them, each with an fsync",
                (*head, "p50", "p99", "other cores", "load"),
                synced_rows,
                2,
                note,
            )
        )
    return made


def highlights(document: Document) -> list[Highlight]:
    """Of the largest sprout with one process, on the largest device."""
    results = [x for x in document["results"] if x["processes"] == 1]
    sprouts = [x for x in results if x["file_system"].startswith("sprout")]
    if not sprouts:
        return []
    device = max(x["writable_bytes"] for x in sprouts)
    most = max(x["chunks"] for x in sprouts if x["writable_bytes"] == device)
    groups = grouped(
        (x for x in results if x["writable_bytes"] == device),
        lambda x: (x["file_system"], x["chunks"]),
    )
    name = next(file_system for file_system, chunks in groups if chunks == most)
    its = _quiet(groups[name, most])[0]
    reference = _quiet(groups.get((_REFERENCE, 0), []))[0]
    rates = [median_of(each, "rate_with_sync") for each in (its, reference)]
    return [
        Highlight(
            f"{number(rates[0] / rates[1], 2)}×",
            f"New small files: a {name} against plain btrfs",
            f"{number(rates[0])}/s against {number(rates[1])}/s with nodatacow, of "
            f"{format_size(its[0]['file_bytes'])}, flushed, one process.",
        )
    ]


@click.command(context_settings=options.SETTINGS)
@click.option("--files", type=options.COUNT, default=50_000, help="Per turn.")
@click.option(
    "--file-size",
    "file_bytes",
    default="16K",
    callback=options.parse_sizes,
    metavar="SIZE",
    help="Up to 1M.",
)
@click.option(
    "--fsync-files",
    type=click.IntRange(min=0),
    default=2_000,
    help="Further files, each with an fsync.",
)
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    default=("275G", "4E", "4092G:4G", "4T:4G"),
    callback=options.parse_seed_sizes,
    metavar="SIZE[:CHUNK]",
    help="Virtual data, and the length of its chunks. From 1,024 on there is a stub.",
)
@click.option(
    "--writable-size",
    "writable_sizes",
    multiple=True,
    default=("16G", "1T"),
    callback=options.parse_sizes,
    metavar="SIZE",
    help="The (sparse) device that is written to; btrfs flushes at a share of it.",
)
@click.option("--processes", type=click.IntRange(1, 64), multiple=True, default=(1,))
@click.option("--plain/--no-plain", default=True, help="Measure plain btrfs as well.")
@options.common_options(repeats=5)
def command(
    files: int,
    file_bytes: int,
    fsync_files: int,
    seeds: Sequence[options.SeedSize],
    writable_sizes: Sequence[int],
    processes: Sequence[int],
    plain: bool,
    repeats: int,
    parent: Path,
    patience_s: float,
    as_json: bool,
) -> None:
    """Write new small files on sprouts and on plain btrfs file systems.

    Seeds, sizes and numbers of processes may be given more than once.

    Each turn makes all file systems anew, one after the other, so that what else the
    machine does meets them alike.
    """
    require(ROOT, BTRFS, LOOP, Helper(MKSEED), Helper(MAKE_FILES))
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
    document = make_document(
        "small_files",
        parameters={"files": files, "fsync_files": fsync_files},
        directory=parent,
        results=[],
    )
    cases = list(product(writable_sizes, processes, kinds))
    for turn in range(1, repeats + 1):
        for writable_bytes, count, kind in cases:
            wait_until_quiet(timeout_s=patience_s)
            result = measure(
                kind,
                parent=parent,
                files=files,
                fsync_files=fsync_files,
                file_bytes=file_bytes,
                writable_bytes=writable_bytes,
                processes=count,
            )
            document["results"].append(result)
            options.progress(
                f"turn {turn}: {' '.join(_columns(result))}: "
                f"{result['rate_with_sync']:,.0f}/s, load {result['load']:.1f}"
            )
    finish(document, as_json=as_json)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.small_files")
