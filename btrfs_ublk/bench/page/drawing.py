"""Plots drawn with matplotlib: narrow ones, which a telephone shows as they are, and of
which several stand side by side where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
)

from btrfs_ublk.bench.page import palette
from btrfs_ublk.bench.page.shapes import Line, Plot, Rows, Scatter
from btrfs_ublk.bench.page.sheet import (
    LITTLE,
    PLAIN,
    SMALL_LINE,
    WIDTH,
    Sheet,
    legend_entry,
    legend_lines,
    log_ticks,
    scale_of,
    text_width,
    wrapped,
)
from btrfs_ublk.bench.stats import grouped

_LABEL_LINE, _BAND, _GAP = 14.0, 18.0, 5.0
#: Beside plots of rows: half of a tick's text has to fit.
_SIDE = 20.0
_SCATTER_LEFT, _SCATTER_RIGHT, _SCATTER_HEIGHT = 46.0, 14.0, 210.0
_SCATTER_WIDTH = WIDTH - _SCATTER_LEFT - _SCATTER_RIGHT
#: From the largest value to the end of an axis.
_ROOM = 1.06
#: Between two values, for the numbers of jobs below them.
_LEAST_GAP = 18.0
_ROLES = {"ours": palette.OURS, "peer": palette.PEER, "baseline": palette.PEER}


def draw(plot: Plot) -> Figure:
    """A figure of WIDTH, as high as it has to be."""
    return _draw_rows(plot) if isinstance(plot, Rows) else _draw_scatter(plot)


def _line_parts(line: Line) -> tuple[list[str], bool]:
    """The lines of its name, and whether what it says fits beside the last of them."""
    room = WIDTH - 2 * _SIDE
    names = wrapped(line.name, PLAIN, room)
    beside = text_width(names[-1], PLAIN) + text_width(line.text, PLAIN) + 14
    return names, beside <= room


def _draw_rows(plot: Rows) -> Figure:
    heights, layouts = [], []
    for line in plot.lines:
        names, beside = _line_parts(line)
        count = len(names) + (not beside)
        layouts.append((names, beside))
        heights.append(count * _LABEL_LINE + _BAND + _GAP)
    factor, unit = 1.0, ""
    if not plot.ratios:
        factor, unit = scale_of(plot.unit, max(_extremes(plot.lines), default=1.0))
    axis = f"{plot.axis}, {unit}" if unit else plot.axis
    axis_lines = wrapped(axis, LITTLE, WIDTH - 2 * _SIDE)
    has_published = any(line.published is not None for line in plot.lines)
    inner = sum(heights) + 2
    below = 18 + len(axis_lines) * SMALL_LINE + has_published * SMALL_LINE + 4
    sheet = Sheet(plot.title, inner + below)
    axes, bottom = sheet.axes(_SIDE, 0, _SIDE, inner)
    axes.set_ylim(inner, 0)
    axes.yaxis.set_major_locator(NullLocator())
    if plot.ratios:
        _ratio_axis(axes, [*_extremes(plot.lines), 1.0])
    else:
        _axis_from_zero(axes, max(_extremes(plot.lines), default=1.0) / factor)
    ticks = [
        x for x in axes.get_xticks() if axes.get_xlim()[0] <= x <= axes.get_xlim()[1]
    ]
    y = 0.0
    for line, height, (names, beside) in zip(plot.lines, heights, layouts):
        _draw_grid(axes, ticks, y + height - _BAND - _GAP, plot.ratios)
        _draw_line(axes, line, y, names, beside, factor)
        y += height
    for number, text in enumerate(axis_lines):
        at = bottom + 18 + (number + 0.5) * SMALL_LINE
        sheet.text(
            WIDTH / 2, at, text, font=LITTLE, color=palette.MUTED.light, align="center"
        )
    if has_published:
        at = bottom + 18 + (len(axis_lines) + 0.5) * SMALL_LINE
        legend_entry(
            sheet,
            _SIDE,
            at,
            "published, on other hardware",
            palette.PUBLISHED.light,
            "D",
            hollow=True,
        )
    return sheet.figure


def _extremes(lines: Sequence[Line]) -> list[float]:
    found = [
        value
        for line in lines
        for value in (*line.values, line.middle, line.low, line.high)
        if math.isfinite(value)
    ]
    return found + [x.published for x in lines if x.published is not None]


def _axis_from_zero(axes: Axes, most: float) -> None:
    axes.set_xlim(0, most * 1.04 if most > 0 else 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_grid(axes: Axes, ticks: Sequence[float], top: float, ratios: bool) -> None:
    """Beside the points of a row only: texts stay free of lines."""
    for tick in ticks:
        is_one = ratios and tick == 1
        axes.plot(
            [tick, tick],
            [top + 1, top + _BAND - 1],
            color=(palette.TEXT if is_one else palette.GRID).light,
            linewidth=1.4 if is_one else 0.8,
            zorder=0.5,
        )


def _ratio_axis(axes: Axes, values: Sequence[float]) -> None:
    positive = [value for value in values if value > 0]
    low, high = min(0.85, *positive) / 1.06, max(1.15, *positive) * 1.06
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = log_ticks(low, high, WIDTH - 2 * _SIDE)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_line(
    axes: Axes,
    line: Line,
    top: float,
    names: Sequence[str],
    beside: bool,
    factor: float,
) -> None:
    place = axes.get_yaxis_transform()
    color = _ROLES[line.role].light
    at = top
    for name in names:
        axes.text(
            0,
            at + _LABEL_LINE / 2,
            name,
            transform=place,
            color=color if line.role == "ours" else palette.TEXT.light,
            fontproperties=PLAIN,
            va="center_baseline",
        )
        at += _LABEL_LINE
    value_at = at - _LABEL_LINE / 2 if beside else at + _LABEL_LINE / 2
    axes.text(
        1,
        value_at,
        line.text,
        transform=place,
        color=palette.TEXT.light,
        fontproperties=PLAIN,
        ha="right",
        va="center_baseline",
    )
    middle_y = at + (not beside) * _LABEL_LINE + _BAND / 2
    if math.isfinite(line.low):
        axes.plot(
            [line.low / factor, line.high / factor],
            [middle_y] * 2,
            color=color,
            linewidth=5,
            alpha=0.35,
            solid_capstyle="butt",
        )
    count = len(line.values)
    spread = [
        middle_y + (_spread(number) * 5 if count > 1 else 0) for number in range(count)
    ]
    axes.plot(
        [value / factor for value in line.values],
        spread,
        linestyle="none",
        marker="o",
        markersize=3.6,
        markerfacecolor=color,
        markeredgecolor="none",
        alpha=0.6,
        clip_on=False,
    )
    axes.plot(
        [line.middle / factor],
        [middle_y],
        linestyle="none",
        marker="|",
        markersize=15,
        markeredgewidth=2.2,
        color=color,
        clip_on=False,
    )
    if line.published is not None:
        axes.plot(
            [line.published / factor],
            [middle_y],
            linestyle="none",
            marker="D",
            markersize=6.5,
            markerfacecolor="none",
            markeredgecolor=palette.PUBLISHED.light,
            markeredgewidth=1.6,
            clip_on=False,
        )


def _spread(number: int) -> float:
    """Within -1 and 1, the same each time, neighbours far apart (golden ratio)."""
    return 2 * ((number + 1) * 0.6180339887 % 1) - 1


def _draw_scatter(plot: Scatter) -> Figure:
    legend = legend_lines([each.name for each in plot.series], WIDTH - 8)
    most = max(y for each in plot.series for _, y in each.points)
    factor, unit = (1.0, "") if plot.y_logarithmic else scale_of(plot.y_unit, most)
    y_axis = f"{plot.y_axis}, {unit}" if unit else plot.y_axis
    y_axis += " (logarithmic)" if plot.y_logarithmic else ""
    is_log = bool(plot.x_ticks) and _is_logarithmic(plot)
    x_axis = f"{plot.x_axis} (logarithmic)" if is_log else plot.x_axis
    y_lines = wrapped(y_axis, LITTLE, WIDTH - 8)
    head = len(y_lines) * SMALL_LINE + 6
    foot = 18 + SMALL_LINE + 4 + len(legend) * SMALL_LINE + 4
    sheet = Sheet(plot.title, head + _SCATTER_HEIGHT + foot)
    for number, text in enumerate(y_lines):
        at = sheet.below_title((number + 0.5) * SMALL_LINE)
        sheet.text(4, at, text, font=LITTLE, color=palette.MUTED.light)
    axes, bottom = sheet.axes(_SCATTER_LEFT, head, _SCATTER_RIGHT, _SCATTER_HEIGHT)
    _scatter_axes(axes, plot, most / factor)
    for number, _ in enumerate(plot.series):
        _draw_series(axes, plot, number, factor)
    sheet.text(
        (_SCATTER_LEFT + WIDTH - _SCATTER_RIGHT) / 2,
        bottom + 18 + SMALL_LINE / 2,
        x_axis,
        font=LITTLE,
        color=palette.MUTED.light,
        align="center",
    )
    for row, entries in enumerate(legend):
        at = bottom + 18 + SMALL_LINE + 4 + (row + 0.5) * SMALL_LINE
        for number, x, text in entries:
            if number < 0:
                sheet.text(4 + x + 15, at, text, font=LITTLE)
                continue
            shade, marker = _look(number)
            legend_entry(sheet, 4 + x, at, text, shade, marker)
    return sheet.figure


def _look(number: int) -> tuple[str, str]:
    """Colour and shape of a series; only their pairs differ after the eighth."""
    count = len(palette.SERIES)
    marker = palette.MARKERS[(number + number // count) % len(palette.MARKERS)]
    return palette.SERIES[number % count].light, marker


def _scatter_axes(axes: Axes, plot: Scatter, most: float) -> None:
    xs = [x for each in plot.series for x, _ in each.points]
    if plot.x_ticks:
        if _is_logarithmic(plot):
            axes.set_xscale("log")
            axes.set_xlim(min(plot.x_ticks) / 1.25, max(plot.x_ticks) * 1.25)
        else:
            axes.set_xlim(0, max(plot.x_ticks) * _ROOM)
        axes.xaxis.set_major_locator(FixedLocator(list(plot.x_ticks)))
        texts = [f"{tick:g}" for tick in plot.x_ticks]
        axes.xaxis.set_major_formatter(FixedFormatter(texts))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(xs) * _ROOM or 1)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if plot.y_logarithmic:
        ys = [y for each in plot.series for _, y in each.points if y > 0]
        axes.set_yscale("log")
        low, high = min(ys) / 1.2, max(ys) * 1.2
        axes.set_ylim(low, high)
        # Lines of text need less room below each other than side by side.
        axes.yaxis.set_major_locator(
            FixedLocator(log_ticks(low, high, 1.5 * _SCATTER_HEIGHT))
        )
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, most * _ROOM if most > 0 else 1)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color=palette.GRID.light, linewidth=0.8)
    axes.set_axisbelow(True)


def _is_logarithmic(plot: Scatter) -> bool:
    """Whether x has to be, so that the values of it do not touch. In a plot that is
    not, a straight line through zero is perfect scaling.
    """
    return _least_gap(plot) * _SCATTER_WIDTH < _LEAST_GAP


def _least_gap(plot: Scatter) -> float:
    """Between values of x, as a share of a linear axis."""
    gaps = [b - a for a, b in zip(plot.x_ticks, plot.x_ticks[1:])]
    return min(gaps, default=1.0) / (max(plot.x_ticks, default=1.0) * _ROOM)


def _aside(plot: Scatter, number: int) -> Callable[[float], float]:
    """Where a series has its points: beside those of others where all have the same few
    values of x.
    """
    if not plot.x_ticks:
        return lambda x: x
    place = number - (len(plot.series) - 1) / 2
    if _is_logarithmic(plot):
        return lambda x: x * 1.035**place
    # Together they take less than the way to the next value.
    step = min(3 / _SCATTER_WIDTH, 0.6 * _least_gap(plot) / max(1, len(plot.series)))
    return lambda x: x + place * step * max(plot.x_ticks) * _ROOM


def _draw_series(axes: Axes, plot: Scatter, number: int, factor: float) -> None:
    series = plot.series[number]
    color, marker = _look(number)
    aside = _aside(plot, number)
    if series.joined:
        groups = grouped(series.points, lambda point: point[0])
        middles = [
            (aside(x), median(y for _, y in groups[x]) / factor) for x in sorted(groups)
        ]
        axes.plot(*zip(*middles), color=color, linewidth=1.2, alpha=0.75)
    axes.plot(
        [aside(x) for x, _ in series.points],
        [y / factor for _, y in series.points],
        linestyle="none",
        marker=marker,
        markersize=4.6,
        markerfacecolor=color,
        markeredgecolor="none",
        alpha=0.75,
        clip_on=False,
    )
