"""What is measured, in which unit, and whether more of it is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from btrfs_ublk.bench.comparison_tables import FASTER, SAME, SLOWER
from btrfs_ublk.bench.stats import bootstrap_interval
from btrfs_ublk.units import format_size

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """``key`` of a result; ``title`` for axes; ``unit`` as in texts."""

    key: str
    title: str
    unit: str
    more_is_better: bool
    #: What "1.3 times" is of, in a sentence.
    noun: str

    def text(self, value: float) -> str:
        """With its unit: "12,300 IOPS", "1.24 s", "4.1 MiB"."""
        if value != value:
            return "–"
        if self.unit == "B":
            return format_size(round(value))
        if self.unit == "B/s":
            return f"{format_size(round(value))}/s"
        if self.unit == "s":
            return duration(value)
        return f"{quantity(value)} {self.unit}".rstrip()


def quantity(value: float) -> str:
    """Three digits at least: "12,345", "12.3", "0.0123"."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 9)}f}"


def duration(seconds: float) -> str:
    """ "1.24 s", "12.4 ms", "8.3 us" """
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1 or not seconds:
            return f"{quantity(seconds * factor)} {unit}"
    return f"{quantity(seconds * 1e6)} µs"


_KNOWN = {
    "iops": Measure("iops", "I/O per second", "IOPS", True, "I/O per second"),
    "total_iops": Measure("total_iops", "Reads per second", "IOPS", True, "reads"),
    "bytes_per_s": Measure("bytes_per_s", "Throughput", "B/s", True, "throughput"),
}
#: The endings of names that tell a unit; the longest first.
_ENDINGS = {
    "_per_s": ("per second", "/s", True),
    "_bytes": ("bytes", "B", False),
    "_kib": ("KiB", "KiB", False),
    "_mib": ("MiB", "MiB", False),
    "_us": ("µs", "µs", False),
    "_ms": ("ms", "ms", False),
    "_s": ("seconds", "s", False),
}
#: More names of plain quantities.
_WORDS = {
    **{"seconds": "_s", "wall_s": "_s", "ms": "_ms", "us": "_us"},
    **{"bytes": "_bytes", "kib": "_kib", "mib": "_mib"},
}


def measure_named(key: str) -> Measure:
    """By its name in a result; one that is not known is told by its ending."""
    if key in _KNOWN:
        return _KNOWN[key]
    ending = _WORDS.get(key.lower())
    words = key
    if ending is None:
        for each in _ENDINGS:
            if key.lower().endswith(each):
                ending, words = each, key[: -len(each)]
                break
    if ending is None:
        return Measure(key, key.replace("_", " "), "", True, key.replace("_", " "))
    title, unit, better = _ENDINGS[ending]
    name = words.replace("_", " ")
    bare = key.lower() in _WORDS
    text = title if bare else f"{name}, {title}"
    if unit in ("s", "ms", "µs"):
        noun = "time" if bare else f"{name} time"
    elif unit in ("B", "KiB", "MiB"):
        noun = "size" if bare else name
    else:
        noun = name
    return Measure(key, text[:1].upper() + text[1:], unit, better, noun)


def told_measure(told: Mapping[str, Any]) -> Measure:
    """As a document describes it: name, unit, better."""
    found = measure_named(str(told["name"]))
    return replace(
        found,
        unit=str(told.get("unit", found.unit)),
        more_is_better=told.get("better", "less") == "more",
    )


#: What is shown of results that have several, in this order.
_FIRST = ("iops", "wall_s", "seconds", "bytes_per_s", "bytes", "mib")


def main_measure(results: Sequence[Result]) -> Measure | None:
    """What the results are about: what they name as their "measure", or the first known
    that all have. None where there is none.
    """
    named = {str(result["measure"]) for result in results if "measure" in result}
    if len(named) == 1:
        return measure_named(named.pop())
    for key in _FIRST:
        if results and all(is_number(result.get(key)) for result in results):
            return measure_named(key)
    return None


def is_number(value: object) -> bool:
    """A finite one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value)


@dataclass(frozen=True)
class Ratio:
    """Of medians, over the turns that both have; with each turn's own ratio. The
    interval is NaN where there are too few.
    """

    middle: float
    low: float
    high: float
    turns: Sequence[float]

    @property
    def known(self) -> bool:
        return self.middle == self.middle

    @property
    def interval_text(self) -> str:
        """ "0.80 – 0.90"; nothing where there is none."""
        if self.low != self.low:
            return ""
        return f"{ratio_text(self.low)} – {ratio_text(self.high)}"

    @property
    def text(self) -> str:
        """ "0.85 (0.80 – 0.90)" """
        if not self.known or not self.interval_text:
            return ratio_text(self.middle)
        return f"{ratio_text(self.middle)} ({self.interval_text})"


def ratio_text(value: float) -> str:
    if value != value or math.isinf(value):
        return "–"
    return (
        f"{value:.2f}"
        if value < 10
        else f"{value:,.1f}" if value < 100 else (f"{value:,.0f}")
    )


def ratio(
    results: Sequence[Result],
    baseline: Sequence[Result],
    value: Callable[[Result], float],
    turn: Callable[[Result], object],
) -> Ratio:
    """Of the values of the turns that both have."""
    below = {turn(result): value(result) for result in baseline}
    both = [
        (value(result), below[turn(result)])
        for result in results
        if turn(result) in below
    ]
    both = [pair for pair in both if all(each > 0 for each in pair)]
    if not both:
        return Ratio(math.nan, math.nan, math.nan, ())
    values, bases = zip(*both)
    low, high = bootstrap_interval(values, bases, paired=True)
    return Ratio(
        median(values) / median(bases),
        low,
        high,
        [one / other for one, other in both],
    )


_RATES_AND_TIMES = ("IOPS", "s", "µs", "ms", "B/s", "/s", "MiB/s")


def verdict_words(verdict: str, found: Ratio, measure: Measure) -> str:
    """Of judged(), for people: "faster", "less", "no sure difference"."""
    if verdict == SAME:
        return "no sure difference"
    if measure.unit in _RATES_AND_TIMES:
        better = (found.middle > 1) == measure.more_is_better
        word = FASTER if better else SLOWER
    else:
        word = "more" if found.middle > 1 else "less"
    if verdict in (FASTER, SLOWER):
        return word
    agreeing = sum((turn > 1) == (found.middle > 1) for turn in found.turns)
    return f"{word} in {agreeing} of {len(found.turns)} turns, too few to be sure"
