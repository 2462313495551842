"""How fast files are made as clones of virtual data, and what the clones cost. The
suite ``clone`` compares by it.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path

from btrfs_ublk.bench.files import Plan, make_files, sync_file_system
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.sprouts import (
    WRITABLE_BYTES,
    Bed,
    Stopwatch,
    bed,
    check_file_system,
    metadata_used_bytes,
)
from btrfs_ublk.bench.verify import stamp, verify, verify_physical
from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.seed import Seed
from btrfs_ublk.units import BLOCK_BYTES, KIB
from btrfs_ublk.volume.temporary import virtual_file_of

MIN_BYTES, MAX_BYTES = 4 * KIB, 64 * KIB

_SEED = 20_241_117
#: Checking each of these runs the helper once, so they are few.
_MAPPED = 20


@dataclass(frozen=True)
class Case:
    """One case to measure. Clones come from the virtual file "sequential"ly, from
    anywhere in the first extent ("one-extent"), or in the file ("random"). Each process
    clones from its "own" clone of the virtual file, or all from a "shared" one, which
    the kernel locks for each clone.
    """

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
