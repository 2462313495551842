"""Measures: what is measured, its unit, and whether more is better."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from btrfs_ublk.bench.fio import parse_workload
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import format_size

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """``key`` is that of a result, ``title`` for axes, ``unit`` as in text."""

    key: str
    title: str
    unit: str
    more_is_better: bool
    #: The noun in "1.3 times the ...".
    noun: str

    @property
    def is_rate_or_time(self) -> bool:
        return self.unit in (*_TIMES, "IOPS") or self.unit.endswith("/s")

    def text(self, value: float) -> str:
        """Format a value with its unit: "12,300 IOPS", "1.24 s", "4.1 MiB"."""
        if value != value:
            return "–"
        if self.unit in ("B", "B/s"):
            return format_size(round(value)) + self.unit[1:]
        if self.unit == "s":
            return duration(value)
        return f"{quantity(value)} {self.unit}".rstrip()


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


def ratio_text(value: float) -> str:
    if value != value or math.isinf(value):
        return "–"
    if 0 < value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


_TIMES = ("s", "ms", "µs")
#: Units by the last word of a name.
_UNITS = {
    **{"s": "s", "seconds": "s", "ms": "ms", "us": "µs"},
    **{"bytes": "B", "kib": "KiB", "mib": "MiB"},
}
_KNOWN = {
    "iops": Measure("iops", "I/O per second", "IOPS", True, "I/O per second"),
    "total_iops": Measure("total_iops", "Reads per second", "IOPS", True, "reads"),
    "bytes_per_s": Measure("bytes_per_s", "Throughput", "B/s", True, "throughput"),
}


def measure_named(key: str) -> Measure:
    """Find a measure by its key; unknown ones are derived from the key's last word."""
    if key in _KNOWN:
        return _KNOWN[key]
    *words, last = key.replace("wall_s", "seconds").split("_")
    name = " ".join(words)
    if words[-1:] == ["per"] and last == "s":
        name = " ".join(words[:-1])
        return Measure(key, f"{name}, per second".capitalize(), "/s", True, name)
    unit = _UNITS.get(last.lower(), "")
    if not unit:
        name = f"{name} {last}".strip()
        return Measure(key, name[:1].upper() + name[1:], "", True, name)
    shown = {"B": "bytes", "s": "seconds"}.get(unit, unit)
    title = f"{name}, {shown}" if name else shown
    noun = f"{name} time".strip() if unit in _TIMES else name or "size"
    return Measure(key, title[:1].upper() + title[1:], unit, False, noun)


def told_measure(told: Mapping[str, Any]) -> Measure:
    """Make a measure from a document's name, unit and better."""
    found = measure_named(str(told["name"]))
    more = told.get("better", "less") == "more"
    return replace(found, unit=str(told.get("unit", found.unit)), more_is_better=more)


def main_measure(results: Sequence[Result]) -> list[Measure]:
    """Return the first known measure that all results have."""
    known = ("iops", "wall_s", "seconds", "bytes_per_s", "bytes", "mib")
    found = (key for key in known if all(is_number(x.get(key)) for x in results))
    return [measure_named(key) for key in found][:1]


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


def split_jobs(name: str) -> tuple[str, int]:
    """Split "randread-psync-j2" into "randread-psync" and 2; without -j, 1 job."""
    match = re.fullmatch(r"(.+?)-j([0-9]+)(-.+)?", name)
    return (match[1] + (match[3] or ""), int(match[2])) if match else (name, 1)
