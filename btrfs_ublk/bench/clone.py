"""How fast files are made as clones of virtual data, and what the clones cost.

``python -m btrfs_ublk.bench.clone --help``
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import click

from btrfs_ublk.base.capabilities import BTRFS, BTRFS_PROGS, LOOP, ROOT, Helper, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import MAKE_FILES, MKSEED
from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import QUIET_NOTE
from btrfs_ublk.bench.files import (
    FILES_PER_DIRECTORY,
    Plan,
    make_files,
    sync_file_system,
)
from btrfs_ublk.bench.report import Document, Result, Table, number
from btrfs_ublk.bench.sprouts import (
    WRITABLE_BYTES,
    Bed,
    Stopwatch,
    bed,
    check_file_system,
    metadata_used_bytes,
)
from btrfs_ublk.bench.study import (
    QUIET_TURNS,
    Column,
    Option,
    QuietColumn,
    Run,
    study,
    table,
)
from btrfs_ublk.bench.verify import stamp, verify, verify_physical
from btrfs_ublk.errors import UsageError
from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.seed import Seed
from btrfs_ublk.units import BLOCK_BYTES, GIB, KIB
from btrfs_ublk.volume.temporary import virtual_file_of

MIN_BYTES, MAX_BYTES = 4 * KIB, 64 * KIB

#: The parts of the virtual file that the clones come from.
PATTERNS = {
    "sequential": "one after the other, from the start",
    "one-extent": "anywhere in the first extent",
    "random": "anywhere in the file",
}
#: What each process clones from. The kernel locks that file during every clone.
SOURCES = {
    "shared": "all from the virtual file",
    "own": "each from a clone of all of the virtual file",
}
_SEED = 20_241_117
#: Checking each of these runs the helper once, so they are few.
_MAPPED = 20


@dataclass(frozen=True)
class Case:
    """One case to measure."""

    virtual_data_size: int
    pattern: str
    clones: int
    processes: int = 1
    sources: str = "shared"
    writable_bytes: int = WRITABLE_BYTES


def make_plan(case: Case, *, extent_bytes: int) -> Plan:
    """Make a plan, always the same for the same case."""
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
    """Measure one turn, on a new seed and sprout."""
    # All seeds of one size have extents of one length, so the plan can come first.
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
    with (
        place.sprouted() as made,
        virtual_file_of(place.seed, made.target) as virtual_file,
    ):
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
        verified = verify(files)
        some = files[:: max(1, len(files) // _MAPPED)]
        verified |= verify_physical(place.seed.virtual_data.device_offset, some)
        watch = Stopwatch()
    return {
        **outcome.record(),
        "sync_s": sync_s,
        "rate_with_sync": len(plan) / (outcome.wall_s + sync_s),
        "metadata_bytes": used_bytes / len(plan),
        # The time to take the sprout down, most of it for unmounting.
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


_NAMES: dict[str, Callable[[Result], str]] = {
    "virtual data": lambda x: options.seed_name(x["virtual_data_size"]),
    "pattern": lambda x: str(x["pattern"]),
    "extents": lambda x: number(x["extents"] if x["pattern"] == "random" else 1),
    "clones": lambda x: number(x["clones"]),
    "processes": lambda x: number(x["processes"]),
    "sources": lambda x: str(x["sources"]),
    "device": lambda x: options.seed_name(x["writable_bytes"]),
}
_RATES = [
    QUIET_TURNS,
    QuietColumn("median/s", "rate"),
    Column("best/s", lambda turns: max(turn["rate"] for turn in turns)),
    QuietColumn("synced/s", "rate_with_sync"),
    QuietColumn("p50", "p50_us", 1),
    QuietColumn("p99", "p99_us", 1),
    QuietColumn("p99.9", "p99.9_us"),
    QuietColumn("max", "max_us"),
    QuietColumn("CPU us", "cpu_us", 1),
    QuietColumn("waits", "waits", 2),
    QuietColumn("other cores", "other_cores", 2),
    QuietColumn("load", "load", 1),
]
_COSTS = [
    QuietColumn("bytes", "metadata_bytes"),
    QuietColumn("sync s", "sync_s", 2),
    QuietColumn("unmount s", "unmount_s", 2),
    QuietColumn("mount s", "mount_s", 3),
    QuietColumn("check s", "check_s", 1),
    Column("verified", lambda turns: sum(turn["verified_clones"] for turn in turns)),
]


def _part(number: int) -> Column:
    def median_of_part(turns: Sequence[Result]) -> float:
        return float(median(turn["p50_by_part_us"][number - 1] for turn in turns))

    return QuietColumn(f"{number}.", median_of_part, 1)


def tables(document: Document) -> list[Table]:
    """Make tables of rates and latencies by case, and of what the clones cost."""
    results = document["results"]
    parts = min(len(turn["p50_by_part_us"]) for turn in results) if results else 0
    return [
        table(
            "Clones per second: create, FICLONERANGE, ftruncate, close",
            results,
            _NAMES,
            _RATES,
            left=2,
            note=f"{QUIET_NOTE} Latencies in us. CPU us: of the processes, per clone. "
            "Waits: voluntary context switches per clone. Synced: with the syncfs at "
            "the end.",
        ),
        table(
            "Microseconds per clone in each tenth of the work: p50",
            results,
            _NAMES,
            [_part(number) for number in range(1, parts + 1)],
            left=2,
        ),
        table(
            "What they cost",
            results,
            _NAMES,
            _COSTS,
            left=2,
            note="Bytes: metadata in use, per clone. Check: btrfs check, which found "
            "no fault. Verified: clones of all turns whose size and content were "
            "compared.",
        ),
    ]


def _choices(
    flag: str, name: str, known: Mapping[str, str], chosen: Sequence[str]
) -> Option:
    told = "; ".join(f"{key}: {text}" for key, text in known.items())
    return click.option(
        *(flag, name),
        type=click.Choice(list(known)),
        multiple=True,
        default=chosen,
        help=f"Clones come from: {told}",
    )


@study(
    "clone",
    click.option("--clones", type=options.COUNT, default=100_000, help="Per turn."),
    options.sizes_option("--virtual-data-size", "sizes", default=("275G", "4E")),
    _choices("--pattern", "patterns", PATTERNS, ("sequential", "random")),
    options.processes_option,
    _choices("--sources", "sources", SOURCES, ("shared",)),
    options.sizes_option(
        *("--writable-size", "writable_bytes"),
        default="16G",
        help="The (sparse) device that is written to; btrfs flushes at a share of it.",
    ),
    click.option(
        *("--verify", "samples"),
        type=click.IntRange(min=0),
        default=10_000,
        help="How many clones to compare with the virtual data.",
    ),
    click.option("--check/--no-check", default=True, help="btrfs check at the end."),
    needs=(ROOT, BTRFS, LOOP, Helper(MKSEED), Helper(MAKE_FILES)),
    repeats=3,
    about={
        "clone_bytes": [MIN_BYTES, MAX_BYTES],
        "files_per_directory": FILES_PER_DIRECTORY,
        "random_seed": _SEED,
    },
)
def command(
    run: Run,
    clones: int,
    sizes: Sequence[int],
    patterns: Sequence[str],
    processes: Sequence[int],
    sources: Sequence[str],
    writable_bytes: int,
    samples: int,
    check: bool,
) -> None:
    """Make files of 4 to 64 KiB as clones of virtual data, on a new sprout each turn.

    Sizes, patterns, processes and sources may be given more than once: each turn goes
    through all combinations, so that what else the machine does meets them alike.
    """
    require(*([BTRFS_PROGS] if check else []))
    cases = [
        Case(size, pattern, clones, count, source, writable_bytes)
        for size, pattern, count, source in product(sizes, patterns, processes, sources)
        if count > 1 or source == "shared" or sources == ("own",)
    ]
    if min(sizes) < GIB:
        raise UsageError("--virtual-data-size: 1G at least")
    if writable_bytes < GIB:
        raise UsageError("--writable-size: 1G at least")
    if any(case.processes > clones for case in cases):
        raise UsageError("--processes: more than there are clones")
    for turn in run.turns():
        for case in cases:
            run.wait_until_quiet()
            result = measure(case, parent=run.parent, samples=samples, check=check)
            run.add(result)
            options.progress(
                f"turn {turn}: {' '.join(name(result) for name in _NAMES.values())}: "
                f"{result['rate']:,.0f}/s, load {result['load']:.1f}"
            )


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.clone")
