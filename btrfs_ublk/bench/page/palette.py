"""Colours by what they are for, in the light and in the dark.

Told apart with any of the usual kinds of colour blindness, and at a contrast of 3:1 at
least to what is behind them, 4.5:1 where text has them (WCAG 2.1); tests check both.
Series also differ in the shapes of their points.
"""

from __future__ import annotations

from typing import NamedTuple


class Shade(NamedTuple):
    """As "#rrggbb"."""

    light: str
    dark: str


BACKGROUND = Shade("#ffffff", "#14181d")
TEXT = Shade("#1b2128", "#e6e9ec")
MUTED = Shade("#57606a", "#a2abb5")
GRID = Shade("#d9dde2", "#343b44")
OURS = Shade("#0a5fb4", "#62adf2")
PEER = Shade("#5b646e", "#9fa9b3")
PUBLISHED = Shade("#b34a08", "#f0904f")

#: Found by a search for six that differ most for everybody; further series have the
#: same colours and other shapes.
SERIES = (
    Shade("#0055bb", "#66aaee"),
    Shade("#dd6611", "#ccbb11"),
    Shade("#994466", "#cc1111"),
    Shade("#440077", "#7733ff"),
    Shade("#7788dd", "#00ffdd"),
    Shade("#660011", "#007788"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

#: Names for style sheets.
ROLES: dict[str, Shade] = {
    "bg": BACKGROUND,
    "text": TEXT,
    "muted": MUTED,
    "grid": GRID,
    "ours": OURS,
    "peer": PEER,
    "published": PUBLISHED,
    **{f"s{number}": shade for number, shade in enumerate(SERIES)},
}
#: What the colour of a drawing, always light, stands for.
ROLE_OF_LIGHT = {shade.light: name for name, shade in ROLES.items()}
assert len(ROLE_OF_LIGHT) == len(ROLES)
