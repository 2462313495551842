"""Comparisons that belong together: one file of ``suites`` each."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from btrfs_ublk.bench.compare import IOPS
from btrfs_ublk.errors import UsageError

_DIRECTORY = Path(__file__).with_name("suites")


@dataclass(frozen=True)
class Bar:
    """The ratio that a peer should reach to the first peer: in "iops", or in I/O per
    second of CPU time, "per_core".
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

    def to_dict(self) -> dict[str, Any]:
        """Return it for a document."""
        return {
            "title": self.title,
            "peers": list(self.peers),
            "workloads": list(self.workloads),
            "bars": [asdict(bar) for bar in self.bars],
            "measures": [IOPS],
        }


@dataclass(frozen=True)
class Suite:
    """``queues`` and ``depth`` are for block servers; None leaves them to each."""

    description: str
    comparison: Sequence[Mapping[str, Any]]
    queues: int | None = None
    depth: int | None = None

    def comparisons(self) -> Sequence[Comparison]:
        return [
            Comparison(**{**entry, "bars": [Bar(*x) for x in entry.get("bars", ())]})
            for entry in self.comparison
        ]


def suite_names() -> list[str]:
    return sorted(path.stem for path in _DIRECTORY.glob("*.toml"))


def find_suite(name: str) -> Suite:
    """Read a suite. Raises UsageError for an unknown name."""
    if name not in suite_names():
        raise UsageError(
            f"there is no suite {name!r}", hint=f"known: {', '.join(suite_names())}"
        )
    return Suite(**tomllib.loads((_DIRECTORY / f"{name}.toml").read_text()))
