"""Files made as clones of virtual data, by one process and by several: what
``bench.clone`` measures, as a contest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from btrfs_ublk.bench.clone import Case, measure
from btrfs_ublk.bench.contest import Contestant, Measure, OwnContest, Turn
from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.bench.report import Result
from btrfs_ublk.capabilities import BTRFS, LOOP, ROOT, Capability, Helper
from btrfs_ublk.helpers import MAKE_FILES, MKSEED
from btrfs_ublk.units import EIB, TIB

_VIRTUAL_BYTES = 4 * EIB
#: btrfs flushes at a share of it: small ones measure that.
_WRITABLE_BYTES = TIB
_VERIFIED = 1000

#: Processes, and what they clone from.
_CASES = ((1, "shared"), (2, "shared"), (4, "shared"), (2, "own"), (4, "own"))
_SOURCES = {
    "shared": "from the virtual file itself",
    "own": "each from a clone of all of the virtual file",
}


@dataclass(frozen=True)
class Cloning:
    """A new seed and sprout in each turn."""

    processes: int
    sources: str

    layer: ClassVar[str] = "files"
    needs: ClassVar[Sequence[Capability]] = (
        *(ROOT, BTRFS, LOOP),
        *(Helper(MKSEED), Helper(MAKE_FILES)),
    )

    @property
    def name(self) -> str:
        return f"{self.processes}-{self.sources}"

    @property
    def description(self) -> str:
        return f"{self.processes} processes clone {_SOURCES[self.sources]}"

    @contextmanager
    def taking_part(self, setting: Setting) -> Iterator[Turn]:
        def turn(workload: str, _chances: random.Random) -> Result:
            case = Case(
                _VIRTUAL_BYTES,
                "sequential",
                _count(workload),
                self.processes,
                self.sources,
                _WRITABLE_BYTES,
            )
            result = measure(
                case, parent=setting.directory, samples=_VERIFIED, check=False
            )
            return {measure.name: result[measure.name] for measure in _MEASURES} | {
                "other_cores": result["other_cores"],
                "load": result["load"],
            }

        yield turn


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


def workload_name(clones: int) -> str:
    return f"{clones} clones"


def _count(workload: str) -> int:
    return int(workload.split()[0])


def cloning(clones: int) -> OwnContest:
    """Of so many clones in each turn."""
    contestants: list[Contestant] = [Cloning(*case) for case in _CASES]
    workload = workload_name(clones)
    return OwnContest(
        _MEASURES, contestants, {workload: "files of 4 to 64 KiB, one after the other"}
    )
