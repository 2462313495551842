"""How fast files are made as clones of virtual data, and what they cost afterwards.

``python -m btrfs_ublk.bench.clone --help``
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import QUIET_CORES, QUIET_NOTE, wait_until_quiet
from btrfs_ublk.bench.files import (
    FILES_PER_DIRECTORY,
    Plan,
    make_files,
    sync_file_system,
)
from btrfs_ublk.bench.report import (
    Document,
    Highlight,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.sprouts import (
    WRITABLE_BYTES,
    Bed,
    Stopwatch,
    bed,
    check_file_system,
    metadata_used_bytes,
)
from btrfs_ublk.bench.stats import grouped, median_of, undisturbed
from btrfs_ublk.bench.verify import stamp, verify, verify_physical
from btrfs_ublk.capabilities import BTRFS, BTRFS_PROGS, LOOP, ROOT, Helper, require
from btrfs_ublk.entry import run_command
from btrfs_ublk.errors import UsageError
from btrfs_ublk.helpers import MAKE_FILES, MKSEED
from btrfs_ublk.resources.reflink import clone_file
from btrfs_ublk.seed import Seed
from btrfs_ublk.units import BLOCK_BYTES, GIB, KIB

MIN_BYTES, MAX_BYTES = 4 * KIB, 64 * KIB

#: Where in the virtual file the clones come from.
PATTERNS = {
    "sequential": "one after the other, from the start",
    "one-extent": "anywhere in the first extent",
    "random": "anywhere in the file",
}
#: What each process clones from. The kernel locks that file for every clone of it.
SOURCES = {
    "shared": "all from the virtual file",
    "own": "each from a clone of all of the virtual file",
}
_SEED = 20_241_117
#: Each takes a process of the helper, so fewer of them.
_MAPPED = 20


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    virtual_data_size: int
    pattern: str
    clones: int
    processes: int = 1
    sources: str = "shared"
    writable_bytes: int = WRITABLE_BYTES


def make_plan(case: Case, *, extent_bytes: int) -> Plan:
    """The same plan for the same case, every time."""
    rng = random.Random(_SEED)
    sizes = [rng.randint(MIN_BYTES, MAX_BYTES) for _ in range(case.clones)]
    blocks = [-(-size // BLOCK_BYTES) for size in sizes]
    most = MAX_BYTES // BLOCK_BYTES
    end = min(case.virtual_data_size, extent_bytes) // BLOCK_BYTES
    if case.pattern == "sequential":
        offsets, position = [], 0
        for length in blocks:
            if position + length > end:
                position = 0
            offsets.append(position * BLOCK_BYTES)
            position += length
        return Plan(offsets, sizes)
    if case.pattern == "random":
        end = case.virtual_data_size // BLOCK_BYTES
    starts = end - most + 1
    return Plan([rng.randrange(starts) * BLOCK_BYTES for _ in sizes], sizes)


def measure(case: Case, *, parent: Path, samples: int, check: bool) -> Result:
    """One turn, on a new seed and sprout."""
    # Every seed of a size has extents of one length, so the plan can come first.
    plans: list[Plan] = []

    def prepare(seed: Seed) -> None:
        plans.append(make_plan(case, extent_bytes=seed.chunk_bytes))
        stamp(seed, plans[0].sample(samples))

    with bed(
        parent,
        virtual_data_size=case.virtual_data_size,
        writable_bytes=case.writable_bytes,
        prepare=prepare,
    ) as place:
        result = asdict(case) | {"extents": place.seed.chunks}
        result |= _make_clones(case, place, plans[0], samples)
        with place.reattached() as device:
            if check:
                result["check_s"] = check_file_system(device)
            watch = Stopwatch()
            with place.remounted(device):
                result["mount_s"] = watch.lap()
    return result


def _make_clones(case: Case, place: Bed, plan: Plan, samples: int) -> Result:
    with place.sprouted() as made:
        virtual_file = made.target / place.seed.virtual_data.filename
        sources = _sources(case, made.target, virtual_file)
        directory = made.target / "clones"
        directory.mkdir()
        sync_file_system(made.target)
        before_bytes = metadata_used_bytes(made.target)
        outcome = make_files(
            directory,
            plan,
            operation="clone",
            processes=case.processes,
            sources=sources,
        )
        sync_s = sync_file_system(made.target)
        used_bytes = metadata_used_bytes(made.target) - before_bytes
        files = [
            (plan.path(directory, file.number, processes=case.processes), file)
            for file in plan.sample(samples)
        ]
        verified = verify(virtual_file, files)
        some = files[:: max(1, len(files) // _MAPPED)]
        verified |= verify_physical(place.seed.virtual_data.device_offset, some)
        watch = Stopwatch()
    return {
        **outcome.record(),
        "sync_s": sync_s,
        "rate_with_sync": len(plan) / (outcome.wall_s + sync_s),
        "metadata_bytes": used_bytes / len(plan),
        # All of taking the sprout down, of which unmounting is most.
        "unmount_s": watch.lap(),
        **verified,
    }


def _sources(case: Case, target: Path, virtual_file: Path) -> list[Path]:
    if case.sources == "shared":
        return [virtual_file] * case.processes
    own = [target / f"source-{process}" for process in range(case.processes)]
    for path in own:
        size = virtual_file.stat().st_size
        clone_file(virtual_file, path, source_offset=0, size_bytes=size)
    return own


def _case_columns(result: Result) -> tuple[str, ...]:
    return (
        options.seed_name(result["virtual_data_size"]),
        result["pattern"],
        number(result["extents"] if result["pattern"] == "random" else 1),
        number(result["clones"]),
        number(result["processes"]),
        result["sources"],
        options.seed_name(result["writable_bytes"]),
    )


_CASE_COLUMNS = (
    "virtual data",
    "pattern",
    "extents",
    "clones",
    "processes",
    "sources",
    "device",
)


def tables(document: Document) -> list[Table]:
    """Of each case: rates and latencies; then what the clones cost."""
    cases = grouped(document["results"], _case_columns)
    rates, parts, costs = [], [], []
    for case, all_results in cases.items():
        rate = [result["rate"] for result in all_results]
        quiet = undisturbed(all_results, most_cores=QUIET_CORES)
        results = quiet or all_results
        medians = {
            name: number(median_of(results, name), digits)
            for name, digits in (
                *(("rate", 0), ("rate_with_sync", 0), ("cpu_us", 1), ("waits", 2)),
                *(("p50_us", 1), ("p99_us", 1), ("p99.9_us", 0), ("max_us", 0)),
                *(("metadata_bytes", 0), ("sync_s", 2), ("load", 1)),
                *(("unmount_s", 2), ("mount_s", 3), ("check_s", 1)),
                ("other_cores", 2),
            )
        }
        rates.append(
            (
                *(
                    *case,
                    f"{len(quiet)} of {len(all_results)}",
                    medians["rate"],
                    number(max(rate)),
                ),
                *(medians[name] for name in _RATE_COLUMNS.values()),
            )
        )
        by_part = zip(*(result["p50_by_part_us"] for result in results))
        parts.append((*case, *(number(median(values), 1) for values in by_part)))
        verified = sum(result["verified_clones"] for result in all_results)
        costs.append(
            (
                *case,
                *(medians[name] for name in _COST_COLUMNS.values()),
                number(verified),
            )
        )
    left = 2
    return [
        Table(
            "Clones per second: create, FICLONERANGE, ftruncate, close",
            (*_CASE_COLUMNS, "quiet", "median/s", "best/s", *_RATE_COLUMNS),
            rates,
            left,
            f"{QUIET_NOTE} Latencies in us. CPU us: of the processes, per clone. "
            "Waits: voluntary context switches per clone. Synced: with the syncfs at "
            "the end.",
        ),
        Table(
            "Microseconds per clone in each tenth of the work: p50",
            (*_CASE_COLUMNS, *(f"{n}." for n in range(1, 11))),
            parts,
            left,
        ),
        Table(
            "What they cost",
            (*_CASE_COLUMNS, *_COST_COLUMNS, "verified"),
            costs,
            left,
            "Bytes: metadata in use, per clone. Check: btrfs check, which found no "
            "fault. Verified: clones of all turns whose size, content and extents were "
            "compared.",
        ),
    ]


def highlights(document: Document) -> list[Highlight]:
    """Of one process and the largest virtual data."""
    single = [x for x in document["results"] if x["processes"] == 1]
    if not single:
        return []
    size = max(result["virtual_data_size"] for result in single)
    its = [result for result in single if result["virtual_data_size"] == size]
    return [
        Highlight(
            f"{number(median_of(its, 'rate'))}/s",
            f"Files made as clones of {options.seed_name(size)} of virtual data",
            f"By one process, up to {number(max(x['clones'] for x in its))} of them; "
            f"each takes {number(median_of(its, 'metadata_bytes'))} bytes of metadata.",
        )
    ]


_RATE_COLUMNS = {
    "synced/s": "rate_with_sync",
    "p50": "p50_us",
    "p99": "p99_us",
    "p99.9": "p99.9_us",
    "max": "max_us",
    "CPU us": "cpu_us",
    "waits": "waits",
    "other cores": "other_cores",
    "load": "load",
}
_COST_COLUMNS = {
    "bytes": "metadata_bytes",
    "sync s": "sync_s",
    "unmount s": "unmount_s",
    "mount s": "mount_s",
    "check s": "check_s",
}


@click.command(context_settings=options.SETTINGS)
@click.option("--clones", type=options.COUNT, default=100_000, help="Per turn.")
@click.option(
    "--virtual-data-size",
    "sizes",
    multiple=True,
    default=("275G", "4E"),
    callback=options.parse_sizes,
    metavar="SIZE",
)
@click.option(
    "--pattern",
    "patterns",
    type=click.Choice(list(PATTERNS)),
    multiple=True,
    default=("sequential", "random"),
    help="Clones come from: " + "; ".join(f"{k}: {v}" for k, v in PATTERNS.items()),
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    multiple=True,
    default=(1,),
    help="Each makes its part of the clones, in a directory of its own.",
)
@click.option(
    "--sources",
    type=click.Choice(list(SOURCES)),
    multiple=True,
    default=("shared",),
    help="Processes clone from: " + "; ".join(f"{k}: {v}" for k, v in SOURCES.items()),
)
@click.option(
    "--writable-size",
    "writable_bytes",
    default="16G",
    callback=options.parse_sizes,
    metavar="SIZE",
    help="The (sparse) device that is written to; btrfs flushes at a share of it.",
)
@click.option(
    "--verify",
    "samples",
    type=click.IntRange(min=0),
    default=10_000,
    help="How many clones to compare with the virtual data.",
)
@click.option("--check/--no-check", default=True, help="Run btrfs check at the end.")
@options.common_options(repeats=3)
def command(
    clones: int,
    sizes: Sequence[int],
    patterns: Sequence[str],
    processes: Sequence[int],
    sources: Sequence[str],
    writable_bytes: int,
    samples: int,
    check: bool,
    repeats: int,
    parent: Path,
    patience_s: float,
    as_json: bool,
) -> None:
    """Make files of 4 to 64 KiB as clones of virtual data, on a new sprout each turn.

    Sizes, patterns, processes and sources may be given more than once: each turn goes
    through all combinations, so that what else the machine does meets them alike.
    """
    require(ROOT, BTRFS, LOOP, Helper(MKSEED), Helper(MAKE_FILES))
    require(*([BTRFS_PROGS] if check else []))
    cases = [
        Case(size, pattern, clones, count, source, writable_bytes)
        for size in sizes
        for pattern in patterns
        for count in processes
        for source in sources
        if count > 1 or source == "shared" or sources == ("own",)
    ]
    if min(sizes) < GIB:
        raise UsageError("--virtual-data-size: 1G at least")
    if writable_bytes < GIB:
        raise UsageError("--writable-size: 1G at least")
    if any(case.processes > clones for case in cases):
        raise UsageError("--processes: more than there are clones")
    document = make_document(
        "clone",
        parameters={
            "clone_bytes": [MIN_BYTES, MAX_BYTES],
            "files_per_directory": FILES_PER_DIRECTORY,
            "random_seed": _SEED,
        },
        directory=parent,
        results=[],
    )
    for turn in range(1, repeats + 1):
        for case in cases:
            wait_until_quiet(timeout_s=patience_s)
            result = measure(case, parent=parent, samples=samples, check=check)
            document["results"].append(result)
            options.progress(
                f"turn {turn}: {' '.join(_case_columns(result))}: "
                f"{result['rate']:,.0f}/s, load {result['load']:.1f}"
            )
    finish(document, as_json=as_json)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.clone")
