"""The results of ``btrfs-ublk bench compare`` as plots and tables."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from btrfs_ublk.bench.compare import groups
from btrfs_ublk.bench.page.inputs import DocumentData
from btrfs_ublk.bench.page.measures import (
    IOPS,
    Measure,
    is_number,
    ratio_text,
    told_measure,
    workload_words,
)
from btrfs_ublk.bench.page.plots import Line, Plot
from btrfs_ublk.bench.report import Table
from btrfs_ublk.bench.stats import Ratio, bootstrap_interval, grouped, ratio_of

Result = dict[str, Any]

#: The names of our servers' peers (peers/ours.py), and of trees of clones.
_OURS = re.compile(r"(ublk|fuse)(-file)?(-clones?)?|(btrfs-ublk|sprout)(-.*)?")
#: With this many contests or more, only the first measure's ratios are drawn.
_MANY = 7


@dataclass(frozen=True)
class Block:
    """Plots and tables that belong together, below one heading; the long ones in
    ``more`` are folded.
    """

    title: str
    intro: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    more: Sequence[Table] = ()


def is_ours(peer: str) -> bool:
    """Whether a peer is ours, by its name."""
    return _OURS.fullmatch(peer) is not None


@dataclass(frozen=True)
class Contest:
    """One measure of one workload: the turns of each peer, in the order of the
    comparison (all are compared with the first). ``rank`` is the measure's place among
    those of the workload.
    """

    comparison: str
    workload: str
    measure: Measure
    rank: int
    title: str
    peers: Mapping[str, Sequence[Result]]

    def values(self, peer: str) -> list[float]:
        return list(self.turns(peer).values())

    def turns(self, peer: str) -> dict[object, float]:
        return {
            (each.get("run"), each.get("turn")): float(each[self.measure.key])
            for each in self.peers[peer]
        }

    def ratio(self, peer: str, other: str) -> Ratio:
        return ratio_of(self.peers[peer], self.peers[other], self.measure.key)


def contests(data: DocumentData) -> Iterator[Contest]:
    """Yield contests by comparison, workload and measure."""
    for comparison, workload, by_peer in groups(data.document):
        told = comparison.get("measures")
        measures = [told_measure(each) for each in told] if told else [IOPS]
        for rank, measure in enumerate(measures):
            peers = {
                str(name): found
                for name, its in by_peer.items()
                if (found := [x for x in its if is_number(x.get(measure.key))])
            }
            many = len(measures) > 1
            title = f"{workload}: {measure.title}" if many else str(workload)
            if peers:
                about = str(comparison["title"]), str(workload)
                yield Contest(*about, measure, rank, title, peers)


def comparison_blocks(data: DocumentData) -> list[Block]:
    """Make a block for each workload of each comparison, and one for all figures."""
    made = []
    found = grouped(contests(data), lambda each: each.comparison)
    for title, its in found.items():
        turns = {each.title: _turns_table(each) for each in its}
        if len(its) >= _MANY:
            plots = [plot for x in its if x.rank == 0 for plot in _ratios_plots(x)]
            made.append(Block(title, plots=plots, more=list(turns.values())))
            continue
        for workload, measures in grouped(its, lambda each: each.workload).items():
            drawn: list[Plot] = []
            for each in measures:
                drawn += [_values_plot(each), *_ratios_plots(each)]
            words = workload_words(workload)
            name = f"{title}: {workload}" if title != workload else title
            more = [turns[each.title] for each in measures]
            intro = [f"{words}."] * (words != workload)
            made.append(Block(name, intro, drawn, more=more))
    if data.tables:
        made.append(Block("All figures", tables=data.tables))
    return made


def _values_plot(contest: Contest) -> Plot:
    """Plot the values of each peer, from zero."""
    lines = [
        measured_line(name, contest.values(name), contest.measure, is_ours(name))
        for name in contest.peers
    ]
    better = "more is better" if contest.measure.more_is_better else "less is better"
    axis = f"{contest.measure.title} ({better})"
    return Plot(contest.title, axis, contest.measure.unit, lines=lines)


def measured_line(
    name: str, values: Sequence[float], measure: Measure, ours: bool
) -> Line:
    middle = median(values)
    interval = bootstrap_interval(values)
    return Line(name, values, measure.text(middle), ours, middle, interval)


def _ratios_plots(contest: Contest) -> Iterator[Plot]:
    baseline, *others = contest.peers
    lines = []
    for name in others:
        middle, low, high, turns = contest.ratio(name, baseline)
        text = ratio_text(middle)
        if low == low:
            text += f" ({ratio_text(low)} – {ratio_text(high)})"
        if turns:
            ours = is_ours(name)
            lines.append(Line(name, turns, text, ours, middle, (low, high)))
    if lines:
        better = "right" if contest.measure.more_is_better else "left"
        axis = f"Times the {contest.measure.noun} of {baseline} ({better} is better)"
        title = f"{contest.title}: ratio to {baseline}"
        yield Plot(title, axis, lines=lines, ratios=True)


def _turns_table(contest: Contest) -> Table:
    columns = [contest.turns(name) for name in contest.peers]
    turns = dict.fromkeys(turn for column in columns for turn in column)
    rows = [
        [str(place), *(contest.measure.text(x.get(turn, math.nan)) for x in columns)]
        for place, turn in enumerate(turns, start=1)
    ]
    title = f"{contest.workload}: every turn, {contest.measure.title}"
    return Table(title, ["turn", *contest.peers], rows)
