"""Plots, drawn by matplotlib as SVG and PNG: so narrow that a telephone shows them
unscaled, and that several fit side by side on wide screens.
"""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

_STYLE = Path(__file__).with_name("plots.mplstyle")
_CSS = Path(__file__).with_name("page.css").read_text("utf-8")
#: Colours by role, in the light theme, which comes first in the style sheet.
_LIGHT = dict(re.findall(r"--(\w+):(#\w{6})", _CSS.partition("@media")[0]))
_ROLES = {light: role for role, light in _LIGHT.items()}
#: The width of a drawing in CSS pixels, as all lengths here.
WIDTH = 360
_ROW, _SIDE = 37, 20
#: Parts that are removed from SVG: dates, unused identifiers, fonts.
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_NEEDLESS = r' font-family: [^;"]*;?| transform="rotate\(-0 [^"]*"|(?<=<g) id="[^"]*"'


@dataclass(frozen=True)
class Line:
    """One row of a plot: every value, their median and its interval (NaN: none), and
    the text beside the name.
    """

    name: str
    values: Sequence[float]
    text: str
    is_ours: bool
    middle: float
    interval: tuple[float, float] = (math.nan, math.nan)

    @property
    def extremes(self) -> list[float]:
        found = [*self.values, self.middle, *self.interval]
        return [value for value in found if math.isfinite(value)]


@dataclass(frozen=True)
class Plot:
    """Rows over one axis: from zero, or, with ``ratios``, logarithmic around 1.

    ``name`` is unique on a page, and the stem of the files. ``axis`` labels the values;
    a ``unit`` of "B" or "s" is scaled to MiB or ms as needed.
    """

    title: str
    axis: str
    unit: str = ""
    name: str = ""
    lines: Sequence[Line] = ()
    ratios: bool = False

    def _saved(self, form: str, **options: Any) -> bytes:
        salt: Any = {"svg.hashsalt": self.name}  # equal names in every run
        content = io.BytesIO()
        with matplotlib.rc_context(salt, _STYLE), warnings.catch_warnings():
            # Browsers have more glyphs; a PNG shows a box for a missing one.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            self.figure().savefig(content, format=form, **options)
        return content.getvalue()

    @cached_property
    def svg(self) -> str:
        """Draw the plot as a file in the light theme; the same for equal plots."""
        text = re.sub(_NEEDLESS, "", self._saved("svg", metadata=_NO_METADATA).decode())
        shape = re.search(r'viewBox="[^"]*"', text)
        body = re.sub(r"\s+", " ", text[text.index("</defs>") + 7 :])
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" '
            f'xmlns:xlink="http://www.w3.org/1999/xlink" width="{WIDTH}" '
            f'{shape and shape[0]} aria-labelledby="{self.name}-t {self.name}-d">'
            f'<title id="{self.name}-t">{escape(self.title)}</title>'
            f'<desc id="{self.name}-d">{escape(self.description)}</desc>{body}'
        )

    @property
    def inline(self) -> Markup:
        """Return the SVG for the page, with colours of its style sheet."""
        every = "|".join(_ROLES)
        return Markup(re.sub(every, lambda x: f"var(--{_ROLES[x[0]]})", self.svg))

    def png(self) -> bytes:
        return self._saved("png", dpi=200, metadata={"Software": None})

    @property
    def description(self) -> str:
        told = [f"{x.name}: {x.text} in {len(x.values)} turns" for x in self.lines]
        scale = "logarithmic" if self.ratios else "from zero"
        return f"{self.axis}, {scale}. {'; '.join(told)}."

    def figure(self) -> Figure:
        extremes = [value for line in self.lines for value in line.extremes]
        factor, unit = _scale(self.unit, max(extremes, default=1.0))
        axis = f"{self.axis}, {unit}" if unit else self.axis
        figure, axes = _sheet(self.title, axis, _ROW * len(self.lines))
        axes.set_ylim(len(self.lines), 0)
        axes.yaxis.set_major_locator(NullLocator())
        if self.ratios:
            _logarithmic(axes, [1 / 1.1, 1.1, *extremes])
        else:
            _from_zero(axes, max(extremes, default=1.0) / factor)
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        for place, line in enumerate(self.lines):
            # Only beside the points, so that no line crosses text.
            span = (place + 0.47, place + 0.92)
            axes.vlines(ticks, *span, color=_LIGHT["grid"], lw=0.8, zorder=0.5)
            if self.ratios:
                axes.vlines([1], *span, color=_LIGHT["text"], lw=1.4, zorder=0.6)
            _draw_line(axes, line, place, factor)
        return figure


def _draw_line(axes: Axes, line: Line, place: float, factor: float) -> None:
    color = _LIGHT["ours" if line.is_ours else "peer"]
    shown: Any = {"va": "center_baseline", "transform": axes.get_yaxis_transform()}
    axes.text(1, place + 0.2, line.text, ha="right", **shown)
    name = axes.text(0, place + 0.2, line.name, **shown)
    name.set_color(color if line.is_ours else _LIGHT["text"])
    _fit(name, WIDTH - 2 * _SIDE - 12 - 7 * len(line.text))
    middle, (low, high) = place + 0.695, line.interval
    if math.isfinite(low):
        axes.plot([low / factor, high / factor], [middle] * 2, color, lw=5, alpha=0.35)
    # Points are offset vertically to separate neighbours (golden ratio).
    spread = [0.24 * ((n + 1) * 0.618034 % 1 - 0.5) for n in range(len(line.values))]
    axes.plot(
        [each / factor for each in line.values],
        [middle + each * (len(line.values) > 1) for each in spread],
        **_points(color, "o", ms=3.6, alpha=0.6),
    )
    stroke = _points(color, "|", ms=15, mew=2.2)
    axes.plot([line.middle / factor], [middle], **stroke)


def _points(color: str, marker: str, **more: Any) -> dict[str, Any]:
    return {"ls": "none", "color": color, "marker": marker, "clip_on": False, **more}


def _sheet(title: str, axis: str, height: float) -> tuple[Figure, Axes]:
    """Make a figure of the necessary height, with axes of a given height."""
    titles = textwrap.wrap(title, 46, break_on_hyphens=False)
    label = textwrap.fill(axis, 54)
    top = 8 + 16 * len(titles)
    bottom = 36 + 13 * label.count("\n")
    total = top + height + bottom
    figure = Figure(figsize=(WIDTH / 72, total / 72), dpi=72)
    for number, line in enumerate(titles):
        place: Any = {"x": 4 / WIDTH, "y": 1 - (9 + 16 * number) / total}
        text = figure.text(
            s=line, weight="bold", size=12, va="center_baseline", **place
        )
        _fit(text, WIDTH - 8)
    width = (WIDTH - 2 * _SIDE) / WIDTH
    axes = figure.add_axes((_SIDE / WIDTH, bottom / total, width, height / total))
    axes.set_xlabel(label, labelpad=3)
    return figure, axes


def _fit(text: Text, room: float) -> None:
    """Shorten a text until it fits."""
    while len(text.get_text()) > 4 and text.get_window_extent().width > room:
        text.set_text(text.get_text()[:-3] + "…")


def _scale(unit: str, most: float) -> tuple[float, str]:
    """Return the divisor of values, and their unit then."""
    if unit == "B":
        power = max(0, min(6, int(math.log(most, 1024)))) if most >= 1 else 0
        return 1024.0**power, ["B", *(f"{letter}iB" for letter in "KMGTPE")][power]
    if unit == "s":
        whole = [each for each in ((1.0, "s"), (1e-3, "ms")) if most >= each[0]]
        return [*whole, (1e-6, "µs")][0]
    return 1.0, ""


def _from_zero(axes: Axes, most: float) -> None:
    axes.set_xlim(0, most * 1.06 or 1)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if most >= 1e3 else "{x:g}")


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """Scale the axis logarithmically around positive values, with few round ticks."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive) / 1.1, max(positive) * 1.1
    axes.set(xscale="log", xlim=(low, high))
    locator: Any = LogLocator(subs=(1, 2, 5) if high / low < 80 else (1,), numticks=6)
    if high / low < 5:
        locator = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
    ticks = [x for x in locator.tick_values(low, high) if low <= x <= high]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
