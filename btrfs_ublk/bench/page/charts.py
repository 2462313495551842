"""The one kind of drawing of the page: rows of dots over an axis that begins at zero.

Positions are shares of the width in percent, so page.html draws them at any width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from btrfs_ublk.bench.page.measures import Measure
from btrfs_ublk.bench.stats import Ratio, bootstrap_interval

#: An axis has about this many steps, each 1, 2, 2.5 or 5 times a power of ten.
_STEPS = 4
#: The room to the right of the largest value.
_MARGIN = 1.04


@dataclass(frozen=True)
class Line:
    """One row: every value, their median and its 95 % interval (NaN: none), the median
    as text, and its ratio to another row's as text.
    """

    name: str
    values: Sequence[float]
    is_ours: bool
    middle: float
    interval: tuple[float, float]
    text: str
    ratio: str = ""


@dataclass(frozen=True)
class Chart:
    """Rows over one axis. ``note`` says what the ratios are of."""

    title: str
    axis: str
    lines: Sequence[Line]
    note: str = ""

    @property
    def most(self) -> float:
        values = [
            value
            for line in self.lines
            for value in (*line.values, *line.interval)
            if math.isfinite(value)
        ]
        return max([*values, 0.0]) * _MARGIN or 1.0

    def at(self, value: float) -> float:
        """Return the place of a value, in percent of the width."""
        return round(100 * min(max(value / self.most, 0.0), 1.0), 2)

    def dots(self, line: Line) -> list[tuple[float, float]]:
        """Return the place of each value, and its height within the row in pixels:
        neighbours lie above each other, by the golden ratio."""
        heights = [12 * ((n + 1) * 0.618034 % 1 - 0.5) for n in range(len(line.values))]
        return [(self.at(x), round(y, 1)) for x, y in zip(line.values, heights)]

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Return places and texts of round values."""
        rough = self.most / _STEPS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(x * power for x in (1, 2, 2.5, 5, 10) if x * power >= rough * 0.99)
        values = [number * step for number in range(int(self.most / step) + 1)]
        return [(self.at(x), f"{x:,.10g}") for x in values]


def measured_line(
    name: str,
    values: Sequence[float],
    measure: Measure,
    is_ours: bool,
    ratio: Ratio | None = None,
) -> Line:
    """Make a row of values, which must not be empty."""
    middle = median(values)
    interval = bootstrap_interval(values)
    told = ratio_text(ratio) if ratio and ratio.turns else ""
    return Line(name, values, is_ours, middle, interval, measure.text(middle), told)


def ratio_text(ratio: Ratio) -> str:
    """Format a ratio with its interval: "0.27 × (0.25 – 0.31)"."""
    text = f"{number(ratio.middle)} ×"
    if ratio.low != ratio.low:
        return text
    return f"{text} ({number(ratio.low)} – {number(ratio.high)})"


def number(value: float) -> str:
    """Format a ratio with two or three digits: "0.27", "2.1", "437"."""
    if not math.isfinite(value):
        return "–"
    if 0 < value < 0.1:
        return f"{value:.2g}"
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"
