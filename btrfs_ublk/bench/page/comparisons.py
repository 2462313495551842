"""The results of ``btrfs-ublk bench compare`` as plots, tables and sentences."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from btrfs_ublk.bench.compare import (
    FASTER,
    SAME,
    SLOWER,
    Ratio,
    groups,
    judged,
    ratio_of,
)
from btrfs_ublk.bench.page.inputs import DocumentData
from btrfs_ublk.bench.page.measures import (
    Measure,
    is_number,
    main_measure,
    ratio_text,
    split_jobs,
    told_measure,
    workload_words,
)
from btrfs_ublk.bench.page.plots import Line, Plot, Rows, Scatter, Series
from btrfs_ublk.bench.report import Table
from btrfs_ublk.bench.stats import bootstrap_interval, grouped
from btrfs_ublk.bench.suite import find_suite

Result = dict[str, Any]

#: The names of our servers' peers (peers/ours.py), and of trees of clones.
_OURS = re.compile(r"(ublk|fuse)(-file)?(-clones?)?|(btrfs-ublk|sprout)(-.*)?")
#: With this many contests or more, only the first measure's ratios are drawn.
_MANY = 7
#: Longer tables are folded.
_MANY_ROWS = 15


class Finding(NamedTuple):
    """One finding of the summary: a figure, its meaning in a few words, and its
    subject. A higher ``weight`` comes first.
    """

    figure: str
    interval: str
    headline: str
    sentence: str
    weight: float = 0.0


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


def interval_text(ratio: Ratio) -> str:
    """Format the interval as "0.80 – 0.90", or "" if there is none."""
    text = f"{ratio_text(ratio.low)} – {ratio_text(ratio.high)}"
    return text if ratio.low == ratio.low else ""


def is_ours(peer: str) -> bool:
    """Whether a peer is ours, by its name."""
    return _OURS.fullmatch(peer) is not None


@dataclass(frozen=True)
class Contest:
    """One measure of one workload: the turns of each peer, in the order of the
    comparison (all are compared with the first), and figures that others published, by
    setting. ``rank`` is the measure's place among those of the workload.
    """

    comparison: str
    workload: str
    measure: Measure
    rank: int
    title: str
    peers: Mapping[str, Sequence[Result]]
    theirs: Sequence[Mapping[str, float]]

    def values(self, peer: str) -> list[float]:
        return list(self.turns(peer).values())

    def turns(self, peer: str) -> dict[object, float]:
        return {
            (each.get("run"), each.get("turn")): float(each[self.measure.key])
            for each in self.peers[peer]
        }

    def ratio(self, peer: str, other: str) -> Ratio:
        return ratio_of(self.peers[peer], self.peers[other], self.measure.key)

    def published(self, peer: str, other: str) -> float | None:
        """Return the ratio that others published, from other hardware."""
        found = [x[peer] / x[other] for x in self.theirs if {peer, other} <= x.keys()]
        return found[0] if found else None


def contests(data: DocumentData) -> Iterator[Contest]:
    """Yield contests by comparison, workload and measure."""
    published = data.document["parameters"].get("published")
    for comparison, workload, by_peer in groups(data.document):
        measures = [told_measure(each) for each in comparison.get("measures") or ()]
        measures = measures or main_measure(
            [x for its in by_peer.values() for x in its]
        )
        for rank, measure in enumerate(measures):
            peers = {
                str(name): told
                for name, its in by_peer.items()
                if (told := [x for x in its if is_number(x.get(measure.key))])
            }
            many = len(measures) > 1
            title = f"{workload}: {measure.title}" if many else str(workload)
            theirs = _theirs(published, str(workload), measure.key)
            if peers:
                about = str(comparison["title"]), str(workload)
                yield Contest(*about, measure, rank, title, peers, theirs)


def _theirs(
    published: Mapping[str, Any] | None, workload: str, measure: str
) -> list[dict[str, float]]:
    """Return published figures by setting: the document's, or those of the first
    btrfs-ublk, which name no depth, so that the depth is ignored.
    """
    settings: dict[object, dict[str, float]] = {}
    for x in (published or original())["figures"]:
        names = [x["workload"], workload]
        if not published:
            names = [re.sub(r"-d\d+", "", name) for name in names]
        if names[0] == names[1] and x["measure"] == measure and x["like"]:
            its = settings.setdefault(x.get("setting"), {})
            its.setdefault(str(x["like"]), float(x["value"]))
    return list(settings.values())


@functools.cache
def original() -> dict[str, Any]:
    """Return the figures that the first btrfs-ublk published."""
    published = find_suite("randread").published
    assert published
    return published.to_dict()


def comparison_blocks(data: DocumentData) -> tuple[list[Block], list[Finding]]:
    """Make a block for each workload of each comparison, one for its scaling, and one
    for all ratios. Also returns the findings.
    """
    found = list(contests(data))
    made = []
    for title, its in grouped(found, lambda each: each.comparison).items():
        turns = {each.title: _turns_table(each) for each in its}
        if len(its) >= _MANY:
            plots = [plot for x in its if x.rank == 0 for plot in _ratios_plots(x)]
            made.append(Block(title, plots=plots, more=list(turns.values())))
            continue
        for workload, measures in grouped(its, lambda each: each.workload).items():
            drawn: list[Plot] = []
            for each in measures:
                drawn += [values_plot(each), *_ratios_plots(each), *_cores_plots(each)]
            words = workload_words(workload)
            name = f"{title}: {workload}" if title != workload else title
            more = [turns[each.title] for each in measures]
            intro = [f"{words}."] * (words != workload)
            made.append(Block(name, intro, drawn, more=more))
        if scaling := list(_scaling_plots(its)):
            made.append(Block(f"{title}: scaling", plots=scaling))
    verdicts = judgements(found)
    if table := _ratio_table(verdicts):
        long = len(table.rows) > _MANY_ROWS
        made.append(Block("Ratios", (), (), [table][long:], [table][: int(long)]))
        if not data.document["parameters"].get("published"):
            theirs = [_published_table()] * any(row[7] != "–" for row in table.rows)
            made.append(Block("", tables=theirs))
    if data.tables:
        made.append(Block("All figures", tables=data.tables))
    return made, _findings(verdicts)


def values_plot(contest: Contest) -> Rows:
    """Plot the values of each peer, from zero."""
    lines = [
        measured_line(name, contest.values(name), contest.measure, is_ours(name))
        for name in contest.peers
    ]
    better = "more is better" if contest.measure.more_is_better else "less is better"
    axis = f"{contest.measure.title} ({better})"
    return Rows(contest.title, axis, contest.measure.unit, lines=lines)


def measured_line(
    name: str, values: Sequence[float], measure: Measure, ours: bool
) -> Line:
    middle = median(values)
    interval = bootstrap_interval(values)
    return Line(name, values, measure.text(middle), ours, middle, interval)


def _ratios_plots(contest: Contest) -> Iterator[Rows]:
    baseline, *others = contest.peers
    lines = []
    for name in others:
        middle, low, high, turns = found = contest.ratio(name, baseline)
        interval = f" ({interval_text(found)})" if interval_text(found) else ""
        text, ours = f"{ratio_text(middle)}{interval}", is_ours(name)
        there = contest.published(name, baseline)
        if turns:
            lines.append(Line(name, turns, text, ours, middle, (low, high), there))
    if lines:
        better = "right" if contest.measure.more_is_better else "left"
        axis = f"Times the {contest.measure.noun} of {baseline} ({better} is better)"
        title = f"{contest.title}: ratio to {baseline}"
        yield Rows(title, axis, lines=lines, ratios=True)


def _turns_table(contest: Contest) -> Table:
    columns = [contest.turns(name) for name in contest.peers]
    turns = dict.fromkeys(turn for column in columns for turn in column)
    rows = [
        [str(place), *(contest.measure.text(x.get(turn, math.nan)) for x in columns)]
        for place, turn in enumerate(turns, start=1)
    ]
    title = f"{contest.workload}: every turn, {contest.measure.title}"
    return Table(title, ["turn", *contest.peers], rows)


def _scaling_plots(its: Sequence[Contest]) -> Iterator[Plot]:
    """Plot what was measured with several numbers of jobs."""
    first = [each for each in its if each.rank == 0]
    for base, family in grouped(first, lambda x: split_jobs(x.workload)[0]).items():
        jobs = {float(split_jobs(each.workload)[1]): each for each in family}
        points = [
            (name, (number, value))
            for number, each in jobs.items()
            for name in each.peers
            for value in each.values(name)
        ]
        if len(jobs) > 1:
            measure, title = family[0].measure, f"{base}: scaling with jobs"
            series = [
                Series(name, [point for _, point in its], True)
                for name, its in grouped(points, lambda x: x[0]).items()
            ]
            yield Scatter(
                *(title, measure.title, measure.unit),
                x_axis="Jobs",
                series=series,
                x_ticks=sorted(jobs),
            )


def _cores_plots(contest: Contest) -> Iterator[Plot]:
    """Plot the figures over CPU use: one point for each turn."""
    measure = contest.measure
    series = []
    for name, turns in contest.peers.items():
        told = [each for each in turns if is_number(each.get("cores"))]
        points = [(float(each["cores"]), float(each[measure.key])) for each in told]
        series += [Series(name, points)] if points else []
    if series and measure.more_is_better:
        title = f"{contest.workload}: what it costs"
        axis = "CPU cores in use: reader, server, kernel"
        yield Scatter(title, measure.title, measure.unit, x_axis=axis, series=series)


class Judgement(NamedTuple):
    """One of our peers and another: their ratio, and the verdict in words."""

    contest: Contest
    name: str
    other: str
    ratio: Ratio
    words: str


def _pairs(contest: Contest) -> Iterator[tuple[str, str]]:
    """Yield each of ours with each other; if there are no such, all with the first."""
    ours = [name for name in contest.peers if is_ours(name)]
    others = [name for name in contest.peers if not is_ours(name)]
    if not ours or not others:
        first, *ours = contest.peers
        others = [first]
    yield from product(ours, others)


def judgements(found: Sequence[Contest]) -> list[Judgement]:
    """Judge all pairs of all contests. The verdicts are corrected for the number of all
    pairs.
    """
    tests = {}
    for number, contest in enumerate(found):
        better = "more" if contest.measure.more_is_better else "less"
        for name, other in _pairs(contest):
            tests[number, name, other] = contest.ratio(name, other), better
    made = []
    for key, verdict in judged(tests).items():
        number, name, other = key
        contest, ratio = found[number], tests[key][0]
        words = _verdict_words(verdict, ratio, contest.measure)
        made.append(Judgement(contest, name, other, ratio, words))
    return made


def _verdict_words(verdict: str, found: Ratio, measure: Measure) -> str:
    """Word a verdict: "faster", "less", "no sure difference"; with a question mark if
    the turns agree, but are too few.
    """
    if not found.turns:
        return "no such turns"
    if verdict == SAME:
        return "no sure difference"
    word = "more" if found.middle > 1 else "less"
    if measure.is_rate_or_time:
        word = FASTER if (found.middle > 1) == measure.more_is_better else SLOWER
    return word if verdict in (FASTER, SLOWER) else f"{word}?"


def _findings(verdicts: Sequence[Judgement]) -> list[Finding]:
    """List findings of ours against each other peer. Clones come before devices, which
    people do not read; later measures, and others' figures, come last.
    """
    made = []
    for contest, name, other, ratio, words in verdicts:
        if not ratio.turns or words.endswith("?"):
            continue
        mine, theirs = (
            contest.measure.text(median(contest.values(each))) for each in (name, other)
        )
        sentence = f"{workload_words(contest.workload)}: {mine} against {theirs}."
        there = contest.published(name, other)
        if there is not None:
            sentence += f" Published, on other hardware: {ratio_text(there)}."
        weight = 30.0 + 10 * ("clone" in name) - 20 * bool(contest.rank)
        weight = (weight if is_ours(name) else -100) - list(contest.peers).index(other)
        figure, headline = f"{ratio_text(ratio.middle)}×", f"{name} against {other}"
        head = f"{headline}: {words}"
        made.append(Finding(figure, interval_text(ratio), head, sentence, weight))
    return made


_RATIO_NOTE = (
    "Ratio of the medians over the turns that both have; the interval is a bootstrap "
    "one that draws pairs of turns. A difference is told from 5 % and from six turns "
    "on, where the interval leaves 1 out and chance would do the like in less than 1 "
    "of 20 cases (signs of the differences within turns, Holm, for all rows). A "
    "question mark: all turns say so, and they are too few. Published: the ratio that "
    "others found on other hardware."
)


def _ratio_table(verdicts: Sequence[Judgement]) -> Table | None:
    """Make a table of each of ours to each peer, with intervals."""
    rows = [
        (
            contest.workload,
            name,
            other,
            contest.measure.noun,
            str(len(ratio.turns)),
            ratio_text(ratio.middle),
            interval_text(ratio) or "–",
            ratio_text(contest.published(name, other) or math.nan),
            words,
        )
        for contest, name, other, ratio, words in verdicts
    ]
    ours = any(is_ours(each.name) for each in verdicts)
    columns = ["workload", *(("ours", "peer") if ours else ("peer", "to")), "of"]
    columns += ["turns", "ratio", "95 %", "published", "verdict"]
    return Table("Ratios to each peer", columns, rows, 4, _RATIO_NOTE) if rows else None


def _published_table() -> Table:
    told = original()
    rows = [(x["workload"], x["peer"], f"{x['value']:,.0f}") for x in told["figures"]]
    note = f"From {told['source']}. {told['note']}"
    title = f"Published, on other hardware ({told['hardware']})"
    return Table(title, ("workload", "path", "IOPS"), rows, 2, note)
