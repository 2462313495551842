"""Measures: what is measured, its unit, and whether more is better; and how figures are
written.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from btrfs_ublk.bench.fio import parse_workload
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import format_size


@dataclass(frozen=True)
class Measure:
    """``key`` is that of a result, ``title`` for axes, ``unit`` as in text."""

    key: str
    title: str
    unit: str
    more_is_better: bool = False

    def text(self, value: float) -> str:
        """Format a value with its unit: "12,300 IOPS", "1.24 s", "4.1 MiB"."""
        if value != value:
            return "–"
        if self.unit == "B":
            return format_size(round(value))
        if self.unit == "s":
            return duration(value)
        return f"{quantity(value)} {self.unit}".rstrip()


IOPS = Measure("iops", "I/O per second", "IOPS", True)


def quantity(value: float) -> str:
    """Format with at least three digits: "12,345", "12.3", "0.0123"."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 9)}f}"


def duration(seconds: float) -> str:
    """Format a duration: "1.24 s", "12.4 ms", "8.3 µs"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1 or not seconds:
            return f"{quantity(seconds * factor)} {unit}"
    return f"{quantity(seconds * 1e6)} µs"


def told_measure(told: Mapping[str, Any]) -> Measure:
    """Make a measure from a document's name ("cold_ms"), unit and better."""
    key, unit = str(told["name"]), str(told.get("unit", ""))
    if key == IOPS.key:
        return IOPS
    words = key.split("_")
    name = " ".join(words[:-1] if words[-1] == unit.lower() else words)
    title = ", ".join(filter(None, (name[:1].upper() + name[1:], unit)))
    return Measure(key, title, unit, told.get("better") == "more")


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value)  # type: ignore[arg-type]


def workload_words(name: str) -> str:
    """Describe a workload: "4 KiB random reads, 64 in flight (io_uring), 2 jobs"; the
    name itself if it is not one of fio's.
    """
    try:
        workload = parse_workload(name)
    except UsageError:
        return name
    order = "random" if workload.pattern.startswith("rand") else "sequential"
    pattern = f"{order} {workload.pattern.removeprefix('rand')}s"
    flight = "one at a time" if workload.depth == 1 else f"{workload.depth} in flight"
    jobs = f", {workload.jobs} jobs" if workload.jobs > 1 else ""
    size = format_size(workload.block_bytes)
    return f"{size} {pattern}, {flight} ({workload.engine}){jobs}"
