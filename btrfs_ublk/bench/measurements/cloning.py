"""Making files as clones of virtual data, by one or several processes: how fast, and
what the clones cost. No block server takes part, so this is the cost of btrfs itself.

Before the seed is mounted, the virtual data of some files is stamped: the first and the
last whole 8 bytes contain their own offset in the virtual file. A clone of other data
cannot have these numbers.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Helper
from btrfs_ublk.base.helpers import MAKE_FILES, MKSEED
from btrfs_ublk.bench.file_systems import (
    forgotten,
    metadata_used_bytes,
    sync_file_system,
)
from btrfs_ublk.bench.files import Plan, PlannedFile, make_files
from btrfs_ublk.bench.peer import Contestant, Measure, OwnContest, Setting, Turn
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.suite import Amounts
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.physmap import ContiguousRun, PhysicalMap
from btrfs_ublk.seed import Seed, make_seed
from btrfs_ublk.units import BLOCK_BYTES, EIB, KIB, TIB
from btrfs_ublk.volume.sprout import sprout
from btrfs_ublk.volume.virtual_file import assert_mapping, virtual_file_of

MIN_BYTES, MAX_BYTES = 4 * KIB, 64 * KIB
_VIRTUAL_BYTES = 4 * EIB
#: btrfs flushes when a share of this is dirty: small devices would measure that.
_WRITABLE_BYTES = TIB
_VERIFIED = 1000
#: Checking each of these runs the helper once, so they are few.
_MAPPED = 20
_SEED = 20_241_117
_STAMP = struct.Struct("<Q")

#: The numbers of processes, and what they clone from.
_CASES = ((1, "shared"), (2, "shared"), (4, "shared"), (2, "own"), (4, "own"))
_SOURCES = {
    "shared": "from the virtual file itself",
    "own": "each from a clone of all of the virtual file",
}
_NEEDS = (ROOT, BTRFS, LOOP, Helper(MKSEED), Helper(MAKE_FILES))
_MEASURES = (
    Measure("rate", "clones/s", "more"),
    Measure("rate_with_sync", "clones/s", "more"),
    Measure("p50_us", "us", digits=1),
    Measure("p99_us", "us", digits=1),
    Measure("cpu_us", "us", digits=1),
    Measure("metadata_bytes", "bytes"),
    Measure("mount_s", "s", digits=3),
    Measure("unmount_s", "s", digits=2),
)


def make_plan(clones: int, *, extent_bytes: int) -> Plan:
    """Plan clones of one place after the other, in the first extent; always the same
    for the same number.
    """
    rng = random.Random(_SEED)
    sizes = [rng.randint(MIN_BYTES, MAX_BYTES) for _ in range(clones)]
    offsets, position = [], 0
    for size in sizes:
        length = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if position + length > extent_bytes:
            position = 0
        offsets.append(position)
        position += length
    return Plan(offsets, sizes)


def measure(
    parent: Path, clones: int, processes: int, sources: str, samples: int = _VERIFIED
) -> Result:
    """Measure one turn, on a new seed and sprout. Each process clones from its "own"
    clone of the virtual file, or all from a "shared" one, which the kernel locks for
    each clone.
    """
    with tempdir(parent=parent) as directory:
        seed = make_seed(directory / "seed.img", virtual_data_size=_VIRTUAL_BYTES)
        plan = make_plan(clones, extent_bytes=seed.chunk_bytes)
        stamp(seed, plan.sample(samples))
        writable, target = directory / "writable.img", directory / "mount"
        with writable.open("xb") as file:
            file.truncate(_WRITABLE_BYTES)
        target.mkdir()
        with loop_device(seed.path, read_only=True) as below:
            with sprout(
                below.path,
                target,
                writable_file=writable,
                validate=partial(assert_mapping, seed),
            ):
                result = _make_clones(plan, seed, target, processes, sources, samples)
                began_s = time.monotonic()
            # The time to take the sprout down, most of it for unmounting.
            result["unmount_s"] = time.monotonic() - began_s
            with loop_device(writable) as device, forgotten(device.path):
                began_s = time.monotonic()
                with mounted(device.path, target, options=[f"device={below.path}"]):
                    result["mount_s"] = time.monotonic() - began_s
    return result


def _make_clones(
    plan: Plan, seed: Seed, target: Path, processes: int, sources: str, samples: int
) -> Result:
    with virtual_file_of(seed, target) as virtual_file:
        paths = [virtual_file] * processes
        if sources == "own":
            paths = [target / f"source-{process}" for process in range(processes)]
            size = virtual_file.stat().st_size
            for path in paths:
                clone_file(virtual_file, path, source_offset=0, size_bytes=size)
        directory = target / "clones"
        directory.mkdir()
        sync_file_system(target)
        before_bytes = metadata_used_bytes(target)
        result = make_files(directory, plan, sources=paths)
        sync_s = sync_file_system(target)
        used_bytes = metadata_used_bytes(target) - before_bytes
        files = [
            (plan.path(directory, file.number, processes=processes), file)
            for file in plan.sample(samples)
        ]
        verify(files)
        some = files[:: max(1, len(files) // _MAPPED)]
        verify_physical(seed.virtual_data.device_offset, some)
    return result | {
        "rate_with_sync": len(plan) / (result["wall_s"] + sync_s),
        "metadata_bytes": used_bytes / len(plan),
    }


def _stamp_offsets(file: PlannedFile) -> Iterator[int]:
    yield 0
    yield (file.size // _STAMP.size - 1) * _STAMP.size


def stamp(seed: Seed, files: Iterable[PlannedFile]) -> None:
    """Write the stamps into the image of a seed that is not mounted."""
    start = seed.virtual_data.device_offset
    with seed.path.open("r+b", buffering=0) as image:
        for file in files:
            for inner in _stamp_offsets(file):
                offset = file.offset + inner
                os.pwrite(image.fileno(), _STAMP.pack(offset), start + offset)


def verify(clones: Iterable[tuple[Path, PlannedFile]]) -> None:
    """Verify size and content of clones whose virtual data was stamped. Raises
    BtrfsUblkError for the first wrong one.
    """
    for path, file in clones:
        with path.open("rb", buffering=0) as clone:
            size = os.fstat(clone.fileno()).st_size
            if size != file.size:
                raise BtrfsUblkError(f"{path} has {size} bytes, not {file.size}")
            # Only the stamps are wanted, not the data around them.
            os.posix_fadvise(clone.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for inner in _stamp_offsets(file):
                data = os.pread(clone.fileno(), _STAMP.size, inner)
                if data != _STAMP.pack(file.offset + inner):
                    raise BtrfsUblkError(
                        f"{path} has {data.hex()} at {inner}, which is not virtual "
                        f"data from offset {file.offset}"
                    )


def verify_physical(
    virtual_start: int, clones: Iterable[tuple[Path, PlannedFile]]
) -> None:
    """Verify the physical maps of clones; ``virtual_start`` is where the virtual data
    begins on the device. Raises MappingError or BtrfsUblkError.
    """
    for path, file in clones:
        mapping = PhysicalMap.read(path)
        mapping.assert_all_regular()
        mapping.assert_single_device()
        length = -(-file.size // BLOCK_BYTES) * BLOCK_BYTES
        wanted = ContiguousRun(0, virtual_start + file.offset, length)
        found = mapping.largest_contiguous_run()
        if found != wanted:
            raise BtrfsUblkError(f"{path} is mapped to {found}, not {wanted}")


@contextmanager
def _taking_part(
    clones: int, processes: int, sources: str, setting: Setting
) -> Iterator[Turn]:
    def turn(_workload: str, _chances: random.Random) -> Result:
        result = measure(setting.directory, clones, processes, sources)
        names = [each.name for each in _MEASURES]
        return {name: result[name] for name in (*names, "other_cores", "load")}

    yield turn


def contest(amounts: Amounts) -> OwnContest:
    """Make a contest with that number of clones in each turn."""
    clones = int(amounts["clones"])
    contestants = [
        Contestant(
            f"{processes}-{sources}",
            "files",
            f"{processes} processes clone {_SOURCES[sources]}",
            _NEEDS,
            partial(_taking_part, clones, processes, sources),
        )
        for processes, sources in _CASES
    ]
    told = "files of 4 to 64 KiB, one after the other"
    return OwnContest(_MEASURES, contestants, {f"{clones} clones": told})
