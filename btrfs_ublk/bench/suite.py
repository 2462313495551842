"""Comparisons that belong together: one file of ``suites`` each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from btrfs_ublk.bench.peer import Contest, OwnContest
from btrfs_ublk.bench.reading import READING
from btrfs_ublk.errors import UsageError

_DIRECTORY = Path(__file__).with_name("suites")


@dataclass(frozen=True)
class Bar:
    """The ratio that a peer should reach to the first peer: in one of the measures
    ("iops"), or in I/O per second of CPU time ("per_core").
    """

    peer: str
    workload: str
    ratio: float
    of: str = "iops"


@dataclass(frozen=True)
class Comparison:
    """Peers that are measured in turn, and compared with the first one."""

    title: str
    peers: Sequence[str]
    workloads: Sequence[str]
    bars: Sequence[Bar] = ()
    contest: Contest = READING

    def to_dict(self) -> dict[str, Any]:
        """Return it for a document."""
        return {
            "title": self.title,
            "peers": list(self.peers),
            "workloads": list(self.workloads),
            "bars": [asdict(bar) for bar in self.bars],
            "measures": [asdict(measure) for measure in self.contest.measures],
        }


@dataclass(frozen=True)
class Suite:
    """``queues`` and ``depth`` are for block servers; None leaves them to each."""

    description: str
    comparison: Sequence[Mapping[str, Any]]
    queues: int | None = None
    depth: int | None = None

    def comparisons(self) -> Sequence[Comparison]:
        return [_comparison(**entry) for entry in self.comparison]


def _comparison(
    title: str,
    contest: str = "",
    peers: Sequence[str] = (),
    workloads: Sequence[str] = (),
    bars: Sequence[tuple[Any, ...]] = (),
) -> Comparison:
    """Make a comparison. A ``contest`` that is not of reading by fio is a module, which
    knows its peers and workloads.
    """
    found: Contest = READING
    if contest:
        own: OwnContest = import_module(f"{__package__}.{contest}").CONTEST
        found, peers = own, [each.name for each in own.contestants]
        workloads = list(own.workloads)
    return Comparison(title, peers, workloads, [Bar(*bar) for bar in bars], found)


def suite_names() -> list[str]:
    return sorted(path.stem for path in _DIRECTORY.glob("*.toml"))


def find_suite(name: str) -> Suite:
    """Read a suite. Raises UsageError for an unknown name."""
    if name not in suite_names():
        raise UsageError(
            f"there is no suite {name!r}", hint=f"known: {', '.join(suite_names())}"
        )
    return Suite(**tomllib.loads((_DIRECTORY / f"{name}.toml").read_text()))
