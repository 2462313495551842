"""A sheet to draw on: narrow, filled from the top, with letters that fit.

A unit is a CSS pixel where the sheet is as wide as it is meant to be. Letters are
measured in the widest font that a browser may take instead, so nothing touches there
either.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextToPath

from btrfs_ublk.bench.page import palette

WIDTH = 360
_FONT, SMALL = 11.0, 10.0
_TITLE_LINE, SMALL_LINE = 16.0, 14.0
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "btrfs-ublk",  # the same names in every run
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": _FONT,
    "axes.unicode_minus": True,
    "path.simplify": False,
}
BOLD = FontProperties(family=["DejaVu Sans"], size=12, weight="bold")
PLAIN = FontProperties(family=["DejaVu Sans"], size=_FONT)
LITTLE = FontProperties(family=["DejaVu Sans"], size=SMALL)


@contextmanager
def settings() -> Iterator[None]:
    """All drawing and saving has to be done in here."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Browsers have more letters; a PNG shows a box for such a one.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


@functools.lru_cache(maxsize=10_000)
def text_width(text: str, font: FontProperties) -> float:
    if not text:
        return 0.0
    width, _, _ = TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return float(width)


def wrapped(text: str, font: FontProperties, width: float) -> list[str]:
    """In lines that are not wider; a word that is gets broken."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        for piece in _pieces(word, font, width):
            longer = f"{line} {piece}" if line else piece
            if line and text_width(longer, font) > width:
                lines.append(line)
                line = piece
            else:
                line = longer
    return [*lines, line] if line or not lines else lines


def _pieces(word: str, font: FontProperties, width: float) -> Iterator[str]:
    while text_width(word, font) > width and len(word) > 1:
        end = len(word)
        while end > 1 and text_width(word[:end], font) > width:
            end -= 1
        yield word[:end]
        word = word[end:]
    yield word


class Sheet:
    """A figure that is filled from the top, in units."""

    def __init__(self, title: str, below: float) -> None:
        self._title = wrapped(title, BOLD, WIDTH - 8)
        self._top = len(self._title) * _TITLE_LINE + 6
        self.height = self._top + below
        self.figure = Figure(figsize=(WIDTH / 72, self.height / 72), dpi=72)
        for number, line in enumerate(self._title):
            y = (number + 0.5) * _TITLE_LINE
            self.text(4, y, line, font=BOLD)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        font: FontProperties = PLAIN,
        color: str = palette.TEXT.light,
        align: str = "left",
    ) -> None:
        """At a place from the top left corner of the figure."""
        self.figure.text(
            x / WIDTH,
            1 - y / self.height,
            text,
            fontproperties=font,
            color=color,
            ha=align,
            va="center_baseline",
        )

    def axes(
        self, left: float, top: float, right: float, height: float
    ) -> tuple[Axes, float]:
        """And where it ends; ``top`` is below the title."""
        bottom = self._top + top + height
        axes = self.figure.add_axes(
            (
                left / WIDTH,
                1 - bottom / self.height,
                (WIDTH - left - right) / WIDTH,
                height / self.height,
            )
        )
        axes.patch.set_visible(False)
        for name, spine in axes.spines.items():
            spine.set_visible(name == "bottom")
            spine.set_color(palette.MUTED.light)
            spine.set_linewidth(0.8)
        axes.tick_params(
            colors=palette.MUTED.light, labelsize=SMALL, length=3, width=0.8
        )
        return axes, bottom

    def below_title(self, y: float) -> float:
        return self._top + y


def scale_of(unit: str, most: float) -> tuple[float, str]:
    """What values are divided by, and what they are then."""
    if unit == "B" or unit == "B/s":
        power = max(0, min(6, int(math.log(most, 1024)))) if most >= 1 else 0
        name = ["B", *(f"{letter}iB" for letter in "KMGTPE")][power]
        return 1024.0**power, name + unit[1:]
    if unit == "s":
        if most < 1e-3:
            return 1e-6, "µs"
        return (1e-3, "ms") if most < 1 else (1.0, "s")
    return 1.0, ""


#: Where ticks may be within a power of ten, the most of them first.
_LADDERS = (
    (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    (1, 1.5, 2, 3, 4, 5, 6, 8),
    (1, 1.5, 2, 3, 5, 7),
    (1, 2, 3, 5),
    (1, 2, 5),
    (1, 3),
    (1,),
)
_LEAST_TICK_SPACE = 40.0


def log_ticks(low: float, high: float, space: float) -> list[float]:
    """Round numbers within, so far from each other that their texts do not touch."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [1.0]
    for step in (1, 2, 3, 6):
        for ladder in _LADDERS:
            ticks = [
                factor * 10.0**power
                for power in powers
                if power % step == 0
                for factor in ladder
                if low <= factor * 10.0**power <= high
            ]
            gaps = [
                math.log(b / a) / math.log(high / low) * space
                for a, b in zip(ticks, ticks[1:])
            ]
            if all(gap >= _LEAST_TICK_SPACE for gap in gaps):
                return ticks
    return ticks[:1]


def legend_entry(
    sheet: Sheet,
    x: float,
    y: float,
    text: str,
    color: str,
    marker: str,
    *,
    hollow: bool = False,
) -> None:
    sheet.figure.add_artist(
        Line2D(
            [(x + 5) / WIDTH],
            [1 - y / sheet.height],
            linestyle="none",
            marker=marker,
            markersize=6,
            markerfacecolor="none" if hollow else color,
            markeredgecolor=color,
            markeredgewidth=1.6 if hollow else 0.0,
        )
    )
    sheet.text(x + 15, y, text, font=LITTLE)


def legend_lines(
    names: Sequence[str], room: float
) -> list[list[tuple[int, float, str]]]:
    """Lines of entries: which, where, and the text; long names go on in the next."""
    lines: list[list[tuple[int, float, str]]] = [[]]
    x = 0.0
    for number, name in enumerate(names):
        texts = wrapped(name, LITTLE, room - 15)
        width = 15 + max(text_width(text, LITTLE) for text in texts)
        if x and x + width > room:
            lines.append([])
            x = 0.0
        lines[-1].append((number, x, texts[0]))
        x += width + 16
        for text in texts[1:]:
            lines.append([(-1, 0.0, text)])
            x = room
    return lines
