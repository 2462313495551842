"""Comparisons that belong together: one file of ``suites`` each, with figures that
others have published.

``parse_suite`` lists the keys. A suite with published
figures names its amounts (bytes, seconds, counts) as published. A factor from 0 to 1
reduces all of them, each down to a sensible minimum, to fit this machine.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import psutil

from btrfs_ublk.bench.peer import Contest, OwnContest
from btrfs_ublk.bench.reading import READING, WRITING
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import MIB, format_size, parse_size

_DIRECTORY = Path(__file__).with_name("suites")
_BY_FIO = {"reading": READING, "writing": WRITING}

#: The amounts of a suite, by name.
Amounts = Mapping[str, float]
#: These amounts are known to all comparisons: bytes to read of each, seconds of a turn.
SIZE, RUNTIME = "size_bytes", "runtime_s"

#: "auto" takes the first factor that fits.
_FACTORS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
#: The limit of all turns together, and of the shares of free memory and space.
_MOST_S = 1200.0
_MEMORY_SHARE = 0.5


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
class Quantity:
    """``full`` is the published value, ``least`` the sensible minimum."""

    name: str
    full: float
    least: float
    unit: Literal["bytes", "s", ""] = ""

    def scaled(self, factor: float) -> float:
        """Scale, and round to whole MiB, tenths of a second, or whole numbers."""
        value = max(self.least, self.full * factor)
        if self.unit == "s":
            return round(value, 1)
        if self.unit == "bytes":
            return max(self.least, value // MIB * MIB)
        return int(value)

    def text(self, value: float) -> str:
        if self.unit == "bytes":
            return format_size(int(value))
        return f"{value:g} s" if self.unit == "s" else f"{value:,g}"


@dataclass(frozen=True)
class Cost:
    """The cost of a suite: memory (and files on tmpfs), and one turn of all."""

    memory_bytes: float
    turn_s: float


@dataclass(frozen=True)
class Scaling:
    quantities: Sequence[Quantity]
    cost: Callable[[Amounts], Cost]

    def amounts(self, factor: float) -> dict[str, float]:
        return {each.name: each.scaled(factor) for each in self.quantities}

    def factor_for(self, parent: Path, *, turns: int) -> float:
        """Return the largest factor that fits half of the free memory and space, and 20
        minutes. Raises BtrfsUblkError when nothing fits the memory.
        """
        free_bytes = _free_bytes(parent)
        for factor in _FACTORS:
            cost = self.cost(self.amounts(factor))
            if cost.memory_bytes > free_bytes * _MEMORY_SHARE:
                continue
            if factor == _FACTORS[-1] or cost.turn_s * turns <= _MOST_S:
                return factor
        least = self.cost(self.amounts(_FACTORS[-1])).memory_bytes
        raise BtrfsUblkError(
            f"{format_size(int(free_bytes))} are free in memory and in {parent}: "
            f"half of that is too little, {format_size(int(least))} are needed",
            hint="end what uses memory, or name another --parent",
        )

    def told(self, factor: float) -> str:
        """Describe a factor: "scaled by 0.01: size_bytes 8 GiB -> 81 MiB, …"."""
        amounts = self.amounts(factor)
        parts = [
            f"{each.name} {each.text(each.full)} -> {each.text(amounts[each.name])}"
            for each in self.quantities
            if amounts[each.name] != each.full
        ]
        return f"scaled by {factor:g}: {', '.join(parts)}" if parts else "full size"

    def record(self, factor: float) -> dict[str, Any]:
        """Return the scale for a document."""
        return {
            "factor": factor,
            "full": {each.name: each.full for each in self.quantities},
            "used": self.amounts(factor),
            "units": {each.name: each.unit for each in self.quantities},
        }


def _free_bytes(parent: Path) -> float:
    space = os.statvfs(parent)
    free_bytes = space.f_bavail * space.f_frsize
    return float(min(free_bytes, psutil.virtual_memory().available))


def parse_factor(text: str) -> float | None:
    """Parse a factor; "auto" is None. Raises UsageError for an invalid one."""
    if text == "auto":
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 1:
        raise UsageError(
            f"--scale {text!r} is neither auto nor a number above 0, up to 1",
            hint="0.01 is a hundredth of what was published",
        )
    return factor


@dataclass(frozen=True)
class Suite:
    """``queues`` and ``depth`` are for block servers; None leaves them to each. With
    ``scaling``, the comparisons depend on its amounts.
    """

    description: str
    comparison: Sequence[Mapping[str, Any]]
    queues: int | None = None
    depth: int | None = None
    scaling: Scaling | None = None
    published: Published | None = None

    def comparisons_of(self, amounts: Amounts) -> Sequence[Comparison]:
        return [_comparison(amounts, **entry) for entry in self.comparison]


def _comparison(
    amounts: Amounts,
    title: str,
    contest: str = "reading",
    peers: Sequence[str] = (),
    workloads: Sequence[str] = (),
    bars: Sequence[tuple[Any, ...]] = (),
) -> Comparison:
    """Make a comparison. A contest that is not by fio is a module of ``measurements``,
    which knows its peers and workloads.
    """
    found: Contest | None = _BY_FIO.get(contest)
    if found is None:
        module = import_module(f"{__package__}.measurements.{contest}")
        own: OwnContest = module.contest(amounts)
        found, peers = own, [each.name for each in own.contestants]
        workloads = list(own.workloads)
    return Comparison(title, peers, workloads, [Bar(*bar) for bar in bars], found)


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
    amounts, cost = values.pop("amounts", None), values.pop("cost", {})
    if published := values.get("published"):
        tables = published.pop("table")
        figures = [figure for table in tables for figure in _figures(**table)]
        values["published"] = Published(**published, figures=figures)
    suite = Suite(**values)
    return replace(suite, scaling=_scaling(suite, amounts, cost)) if amounts else suite


def suite_names() -> list[str]:
    return sorted(path.stem for path in _DIRECTORY.glob("*.toml"))


def find_suite(name: str) -> Suite:
    """Read a suite. Raises UsageError for an unknown name."""
    if name not in suite_names():
        raise UsageError(
            f"there is no suite {name!r}", hint=f"known: {', '.join(suite_names())}"
        )
    return parse_suite((_DIRECTORY / f"{name}.toml").read_text())
