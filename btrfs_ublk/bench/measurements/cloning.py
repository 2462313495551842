"""Making files as clones of virtual data, by one or several processes: what
``bench.clone`` measures, as a contest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Helper
from btrfs_ublk.base.helpers import MAKE_FILES, MKSEED
from btrfs_ublk.bench.clone import Case, measure
from btrfs_ublk.bench.measurement import Contestant, Measure, OwnContest, Turn
from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.scale import Amounts
from btrfs_ublk.units import EIB, TIB

_VIRTUAL_BYTES = 4 * EIB
#: btrfs flushes when a share of this is dirty: small devices would measure that.
_WRITABLE_BYTES = TIB
_VERIFIED = 1000

#: The numbers of processes, and what they clone from.
_CASES = ((1, "shared"), (2, "shared"), (4, "shared"), (2, "own"), (4, "own"))
_SOURCES = {
    "shared": "from the virtual file itself",
    "own": "each from a clone of all of the virtual file",
}


_NEEDS = (ROOT, BTRFS, LOOP, Helper(MKSEED), Helper(MAKE_FILES))


@contextmanager
def _taking_part(
    clones: int, processes: int, sources: str, setting: Setting
) -> Iterator[Turn]:
    """Measure with a new seed and sprout in each turn."""
    case = Case(
        *(_VIRTUAL_BYTES, "sequential", clones, processes, sources, _WRITABLE_BYTES)
    )

    def turn(_workload: str, _chances: random.Random) -> Result:
        result = measure(case, parent=setting.directory, samples=_VERIFIED, check=False)
        names = [each.name for each in _MEASURES]
        return {name: result[name] for name in (*names, "other_cores", "load")}

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
