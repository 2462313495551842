"""Comparisons that belong together: one file of ``suites`` each, with figures that
others have published.

HACKING.md has an example; ``parse_suite`` lists the keys.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from btrfs_ublk.bench.measurement import Contest, OwnContest
from btrfs_ublk.bench.reading import READING, WRITING
from btrfs_ublk.bench.scale import Amounts, Cost, Quantity, Scaling
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import parse_size

_DIRECTORY = Path(__file__).with_name("suites")
_BY_FIO = {"reading": READING, "writing": WRITING}


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
            "measures": [measure.to_dict() for measure in self.contest.measures],
        }


@dataclass(frozen=True)
class Figure:
    """``peer`` is its published name, ``like`` the equal or similar peer of ours.
    ``measure`` is the key in our results, with the same unit.
    """

    workload: str
    peer: str
    like: str | None
    measure: str
    value: float
    #: Ratios are to the first figure of the same workload, measure and setting.
    setting: str = ""


@dataclass(frozen=True)
class Published:
    """Figures that others have published, from their own hardware: only ratios can be
    compared with ours. ``source`` names authors and date, ``note`` the differences.
    """

    source: str
    hardware: str
    note: str
    figures: Sequence[Figure]

    def to_dict(self) -> dict[str, Any]:
        """Return it for a document."""
        return asdict(self) | {"other_hardware": True}


@dataclass(frozen=True)
class Suite:
    """``queues`` and ``depth`` are for block servers; None leaves them to each. With
    ``scaling``, the comparisons depend on its amounts.
    """

    description: str
    entries: Sequence[Mapping[str, Any]]
    queues: int | None = None
    depth: int | None = None
    scaling: Scaling | None = None
    published: Published | None = None

    def comparisons_of(self, amounts: Amounts) -> Sequence[Comparison]:
        return [_comparison(amounts, **entry) for entry in self.entries]


def _comparison(
    amounts: Amounts,
    title: str,
    contest: str = "reading",
    peers: Sequence[str] | None = None,
    workloads: Sequence[str] | None = None,
    bars: Sequence[tuple[Any, ...]] = (),
) -> Comparison:
    """Make a comparison. A contest that is not by fio is a module of ``measurements``,
    which knows its peers and workloads.
    """
    found: Contest
    if contest in _BY_FIO:
        found = _BY_FIO[contest]
    else:
        module = import_module(f"{__package__}.measurements.{contest}")
        own: OwnContest = module.contest(amounts)
        found, peers = own, peers or [each.name for each in own.contestants]
        workloads = workloads or list(own.workloads)
    return Comparison(
        title, peers or (), workloads or (), [Bar(*bar) for bar in bars], found
    )


def _scaling(
    suite: Suite, values: Mapping[str, Any], cost: Mapping[str, Any]
) -> Scaling:
    quantities = [
        Quantity(
            name,
            _number(value["full"]),
            _number(value["least"]),
            value.get("unit", ""),
        )
        for name, value in values.items()
    ]

    def cost_of(amounts: Amounts) -> Cost:
        def total(factors: Mapping[str, float]) -> float:
            return sum(factor * amounts[name] for name, factor in factors.items())

        measurements = sum(
            len(each.peers) * len(each.workloads)
            for each in suite.comparisons_of(amounts)
        )
        each_s = total(cost["each_s"]) + cost.get("besides_s", 0)
        return Cost(total(cost["memory_bytes"]), measurements * each_s)

    return Scaling(quantities, cost_of)


def _number(value: float | str) -> float:
    """Convert a number, or a size such as "8G"."""
    return parse_size(value) if isinstance(value, str) else value


def _figures(
    rows: Sequence[Sequence[Any]],
    workloads: Sequence[str],
    measures: Sequence[str] = ("iops",),
    factor: float = 1.0,
    setting: str = "",
) -> Iterator[Figure]:
    """Yield figures. Each row has the published name, our peer, and a value for each
    workload, or for each measure of the only one; NaN if it could not be measured.
    """
    columns = [(workload, measure) for workload in workloads for measure in measures]
    for column, (workload, measure) in enumerate(columns):
        for theirs, ours, *values in rows:
            if not math.isnan(value := values[column] * factor):
                yield Figure(workload, theirs, ours or None, measure, value, setting)


def parse_suite(text: str) -> Suite:
    """Parse a suite. ``[amounts]`` are scaled; ``[cost]`` is the memory that they take,
    and the time of each measurement.
    """
    values = tomllib.loads(text)
    published = values.get("published")
    given = {
        "description": values["description"],
        "entries": values["comparison"],
        "queues": values.get("queues"),
        "depth": values.get("depth"),
    }
    if "amounts" in values:
        given["scaling"] = _scaling(Suite(**given), values["amounts"], values["cost"])
    if published:
        tables = published.pop("table")
        figures = [figure for table in tables for figure in _figures(**table)]
        given["published"] = Published(**published, figures=figures)
    return Suite(**given)


def suite_names() -> list[str]:
    return sorted(path.stem for path in _DIRECTORY.glob("*.toml"))


def find_suite(name: str) -> Suite:
    """Read a suite. Raises UsageError for an unknown name."""
    if name not in suite_names():
        raise UsageError(
            f"there is no suite {name!r}", hint=f"known: {', '.join(suite_names())}"
        )
    return parse_suite((_DIRECTORY / f"{name}.toml").read_text())
