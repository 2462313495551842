"""Comparisons that belong together, by name: one module of ``suites`` each.

Nothing else names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from btrfs_ublk.bench import suites
from btrfs_ublk.bench.contest import Contest
from btrfs_ublk.bench.figures import Published
from btrfs_ublk.bench.reading import READING
from btrfs_ublk.bench.scale import Amounts, Scaling
from btrfs_ublk.errors import UsageError


@dataclass(frozen=True)
class Bar:
    """What a peer should reach, as a ratio to the first of its comparison: in one of
    its measures ("iops"), or in I/O per second of CPU time ("per_core").
    """

    peer: str
    workload: str
    ratio: float
    of: str = "iops"


@dataclass(frozen=True)
class Comparison:
    """Peers that are measured in turn; the others are held against the first one."""

    title: str
    peers: Sequence[str]
    workloads: Sequence[str]
    bars: Sequence[Bar] = ()
    contest: Contest = READING

    def to_dict(self) -> dict[str, Any]:
        """For a document."""
        return {
            "title": self.title,
            "peers": list(self.peers),
            "workloads": list(self.workloads),
            "bars": [asdict(bar) for bar in self.bars],
            "measures": [measure.to_dict() for measure in self.contest.measures],
        }


@dataclass(frozen=True)
class Suite:
    """``queues`` and ``depth`` are those of block servers; None leaves them to each.

    With ``scaling``, the comparisons are a function of the amounts. ``published`` are
    somebody else's figures for what is measured here.
    """

    description: str
    comparisons: Sequence[Comparison] | Callable[[Amounts], Sequence[Comparison]]
    queues: int | None = None
    depth: int | None = None
    scaling: Scaling | None = None
    published: Published | None = None

    def comparisons_of(self, amounts: Amounts) -> Sequence[Comparison]:
        if callable(self.comparisons):
            return self.comparisons(amounts)
        return self.comparisons


def suite_names() -> list[str]:
    names = (info.name for info in iter_modules(suites.__path__))
    return sorted(name.replace("_", "-") for name in names)


def find_suite(name: str) -> Suite:
    """Raises UsageError for a name that there is not."""
    if name not in suite_names():
        raise UsageError(
            f"there is no suite {name!r}", hint=f"known: {', '.join(suite_names())}"
        )
    module = import_module(f"{suites.__name__}.{name.replace('-', '_')}")
    suite: Suite = module.SUITE
    return suite
