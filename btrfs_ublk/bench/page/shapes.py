"""What a page is made of, before anything is drawn or written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from btrfs_ublk.bench.page.labels import Label
from btrfs_ublk.bench.report import Table

#: Whose a row is: our servers', somebody else's, or what all are held against.
Role = Literal["ours", "peer", "baseline"]


@dataclass(frozen=True)
class Line:
    """One row of a plot: every value, their median and its interval (NaN: none), and
    what is written beside the name. ``published`` is somebody else's figure.
    """

    name: str
    values: Sequence[float]
    middle: float
    low: float
    high: float
    text: str
    role: Role = "peer"
    published: float | None = None


@dataclass(frozen=True)
class Rows:
    """Lines below each other, over one axis: from zero, or logarithmic around 1."""

    title: str
    axis: str
    lines: Sequence[Line]
    ratios: bool = False
    #: Of the values: "B" and "s" are shown as MiB or ms where these suit.
    unit: str = ""

    @property
    def description(self) -> str:
        """In words, for those who do not see it."""
        scale = "logarithmic" if self.ratios else "from zero"
        texts = [
            f"{line.name}: {line.text} in {len(line.values)} turns"
            + (
                f", published {line.published:.2f} on other hardware"
                if line.published is not None
                else ""
            )
            for line in self.lines
        ]
        return f"{self.axis}, {scale}. {'; '.join(texts)}."


@dataclass(frozen=True)
class Series:
    """Points of one kind. With ``joined``, a line goes through the medians."""

    name: str
    points: Sequence[tuple[float, float]]
    joined: bool = False


@dataclass(frozen=True)
class Scatter:
    """Points over two axes, both from zero unless logarithmic: y where it says so, x
    where its few values ``x_ticks`` would be too near to each other otherwise.
    """

    title: str
    x_axis: str
    y_axis: str
    series: Sequence[Series]
    x_ticks: Sequence[float] = ()
    y_logarithmic: bool = False
    y_unit: str = ""

    @property
    def description(self) -> str:
        texts = []
        for each in self.series:
            ys = [y for _, y in each.points]
            xs = [x for x, _ in each.points]
            texts.append(
                f"{each.name}: {len(ys)} points, x {min(xs):.3g} to {max(xs):.3g}, "
                f"y {min(ys):,.3g} to {max(ys):,.3g}"
            )
        return f"{self.y_axis} over {self.x_axis}. {'; '.join(texts)}."


Plot = Rows | Scatter


@dataclass(frozen=True)
class Finding:
    """One thing of the summary: a figure, what it says in a few words, and of what. The
    higher the ``weight``, the sooner it is told.
    """

    figure: str
    interval: str
    headline: str
    sentence: str
    weight: float = 0.0
    anchor: str = ""
    labels: Sequence[Label] = ()


@dataclass(frozen=True)
class Block:
    """Plots and tables that belong together, below one heading."""

    title: str
    intro: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    #: Long ones, shown when they are asked for.
    more: Sequence[Table] = ()


@dataclass(frozen=True)
class Chapter:
    """All of one file in one environment."""

    title: str
    file: str
    compared: str
    software: str
    labels: Sequence[Label]
    blocks: Sequence[Block]
    findings: Sequence[Finding]
    #: The command that makes such a file, and what else is to be said of that.
    command: str
    remarks: Sequence[str] = ()
    #: Names of published tables that stand beside it.
    published: Sequence[str] = field(default_factory=tuple)
