"""What ``btrfs-ublk bench compare`` found, as plots, tables and sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from btrfs_ublk.bench.comparison_tables import Test, judged
from btrfs_ublk.bench.page.inputs import DocumentData
from btrfs_ublk.bench.page.measures import (
    Measure,
    Ratio,
    is_number,
    main_measure,
    ratio,
    ratio_text,
    told_measure,
    verdict_words,
)
from btrfs_ublk.bench.page.published import published_ratio
from btrfs_ublk.bench.page.shapes import (
    Block,
    Finding,
    Line,
    Plot,
    Role,
    Rows,
    Scatter,
    Series,
)
from btrfs_ublk.bench.page.words import split_jobs, workload_words
from btrfs_ublk.bench.report import Table
from btrfs_ublk.bench.stats import bootstrap_interval, grouped

Result = dict[str, Any]

#: Our servers' peers, see served_peers(), and trees of clones.
_OURS = re.compile(r"(ublk|fuse)(-file)?(-clones?)?|(btrfs-ublk|sprout)(-.*)?")
#: From so many on, only the ratios of the first measure are drawn.
_MANY = 7


def is_ours(peer: str) -> bool:
    """By the names that our peers have."""
    return _OURS.fullmatch(peer) is not None


@dataclass(frozen=True)
class Contest:
    """One measure of one workload: the turns of each peer, in the order of the
    comparison, the first of which all are held against. ``rank`` is that of the measure
    among those of the workload, from 0, ``of`` them.
    """

    parameters: Mapping[str, Any]
    comparison: str
    workload: str
    measure: Measure
    rank: int
    of: int
    peers: Mapping[str, Sequence[Result]]
    _ratios: dict[tuple[str, str], Ratio] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return next(iter(self.peers))

    @property
    def title(self) -> str:
        """The workload; with the measure, where there are several."""
        if self.of > 1:
            return f"{self.workload}: {self.measure.title}"
        return self.workload

    def values(self, peer: str) -> list[float]:
        return [float(each[self.measure.key]) for each in self.peers[peer]]

    def ratio(self, peer: str, other: str) -> Ratio:
        found = self._ratios.get((peer, other))
        if found is None:
            found = self._ratios[peer, other] = ratio(
                self.peers[peer],
                self.peers[other],
                lambda each: float(each[self.measure.key]),
                lambda each: (each.get("run"), each.get("turn")),
            )
        return found

    def published(self, peer: str, other: str) -> float | None:
        return published_ratio(
            self.parameters, peer, other, self.workload, self.measure.key
        )


def contests(data: DocumentData) -> Iterator[Contest]:
    """By comparison, workload and measure."""
    parameters = data.document["parameters"]
    by_title = grouped(data.document["results"], lambda each: each["comparison"])
    for comparison in parameters["comparisons"]:
        results = by_title.get(comparison["title"], [])
        measured = [each for each in results if each["status"] == "ok"]
        names = [str(name) for name in comparison["peers"]]
        for workload, turns in grouped(measured, lambda x: str(x["workload"])).items():
            measures = _measures(comparison, turns)
            for rank, measure in enumerate(measures):
                told = [each for each in turns if is_number(each.get(measure.key))]
                peers = grouped(told, lambda each: str(each["peer"]))
                ordered = {name: peers[name] for name in names if name in peers}
                if ordered:
                    yield Contest(
                        parameters,
                        str(comparison["title"]),
                        workload,
                        measure,
                        rank,
                        len(measures),
                        ordered,
                    )


def _measures(
    comparison: Mapping[str, Any], turns: Sequence[Result]
) -> Sequence[Measure]:
    if comparison.get("measures"):
        return [told_measure(each) for each in comparison["measures"]]
    found = main_measure(turns)
    return [] if found is None else [found]


def blocks(contests_found: Sequence[Contest]) -> list[Block]:
    """Of each comparison one for each workload, and one for what they are together."""
    made = []
    for title, its in grouped(contests_found, lambda each: each.comparison).items():
        if len(its) >= _MANY:
            first = [each for each in its if each.rank == 0]
            plots = [plot for each in first for plot in _ratios_plots(each)]
            more = [_turns_table(each) for each in its]
            made.append(Block(title, plots=plots, more=more))
            continue
        for workload, measures in grouped(its, lambda each: each.workload).items():
            drawn: list[Plot] = []
            for each in measures:
                drawn += [_values_plot(each), *_ratios_plots(each)]
                drawn += _cores_plots(each)
            made.append(
                Block(
                    f"{title}: {workload}" if title != workload else title,
                    _explained(workload),
                    drawn,
                    more=[_turns_table(each) for each in measures],
                )
            )
        scaling = list(_scaling_plots(its))
        if scaling:
            made.append(Block(f"{title}: scaling", plots=scaling))
    return made


def _explained(workload: str) -> list[str]:
    words = workload_words(workload)
    return [] if words == workload else [f"{words}."]


def _role(contest: Contest, name: str) -> Role:
    if is_ours(name):
        return "ours"
    return "baseline" if name == contest.baseline else "peer"


def _values_plot(contest: Contest) -> Rows:
    lines = []
    for name in contest.peers:
        values = contest.values(name)
        low, high = bootstrap_interval(values)
        middle = median(values)
        text = contest.measure.text(middle)
        role = _role(contest, name)
        lines.append(Line(name, values, middle, low, high, text, role))
    better = "more is better" if contest.measure.more_is_better else "less is better"
    axis = f"{contest.measure.title} ({better})"
    return Rows(contest.title, axis, lines, unit=contest.measure.unit)


def _ratios_plots(contest: Contest) -> Iterator[Rows]:
    lines = []
    baseline = contest.baseline
    for name in contest.peers:
        found = contest.ratio(name, baseline)
        if name == baseline or not found.known:
            continue
        lines.append(
            Line(
                name,
                found.turns,
                found.middle,
                found.low,
                found.high,
                found.text,
                _role(contest, name),
                contest.published(name, baseline),
            )
        )
    if lines:
        better = "right" if contest.measure.more_is_better else "left"
        axis = f"Times the {contest.measure.noun} of {baseline} ({better} is better)"
        title = f"{contest.title}: ratio to {baseline}"
        yield Rows(title, axis, lines, ratios=True)


def _turns_table(contest: Contest) -> Table:
    key = contest.measure.key
    by_turn = {
        name: {(x.get("run"), x.get("turn")): float(x[key]) for x in turns}
        for name, turns in contest.peers.items()
    }
    turns = list(dict.fromkeys(turn for found in by_turn.values() for turn in found))
    rows = [
        [
            str(position),
            *(
                contest.measure.text(found.get(turn, math.nan))
                for found in by_turn.values()
            ),
        ]
        for position, turn in enumerate(turns, start=1)
    ]
    title = f"{contest.workload}: every turn, {contest.measure.title}"
    return Table(title, ["turn", *contest.peers], rows)


def _scaling_plots(its: Sequence[Contest]) -> Iterator[Plot]:
    """Of what was measured with several numbers of jobs."""
    first = [each for each in its if each.rank == 0]
    families = grouped(first, lambda each: split_jobs(each.workload)[0])
    for base, family in families.items():
        if len({split_jobs(each.workload)[1] for each in family}) < 2:
            continue
        measure = family[0].measure
        points: dict[str, list[tuple[float, float]]] = {}
        for each in family:
            jobs = split_jobs(each.workload)[1]
            for name in each.peers:
                found = points.setdefault(name, [])
                found += [(float(jobs), value) for value in each.values(name)]
        yield Scatter(
            f"{base}: scaling with jobs",
            "Jobs",
            measure.title,
            [Series(name, found, joined=True) for name, found in points.items()],
            sorted({float(split_jobs(each.workload)[1]) for each in family}),
            y_unit=measure.unit,
        )


def _cores_plots(contest: Contest) -> Iterator[Plot]:
    """What the figures cost in CPUs: one point for each turn."""
    measure = contest.measure
    if not measure.more_is_better:
        return
    series = []
    for name, turns in contest.peers.items():
        points = [
            (float(each["cores"]), float(each[measure.key]))
            for each in turns
            if is_number(each.get("cores"))
        ]
        if points:
            series.append(Series(name, points))
    if series:
        yield Scatter(
            f"{contest.workload}: what it costs",
            "CPU cores in use: reader, server, kernel",
            measure.title,
            series,
            y_unit=measure.unit,
        )


def _pairs(contest: Contest) -> Iterator[tuple[str, str]]:
    """Each of ours with each other; where all or none are ours, all with the first."""
    ours = [name for name in contest.peers if is_ours(name)]
    others = [name for name in contest.peers if not is_ours(name)]
    if not ours or not others:
        others = [contest.baseline]
        ours = [name for name in contest.peers if name != contest.baseline]
    for name in ours:
        for other in others:
            yield name, other


@dataclass(frozen=True)
class Judgement:
    """One of ours and another: the ratio, and what may be said of it."""

    contest: Contest
    name: str
    other: str
    ratio: Ratio
    words: str

    @property
    def published(self) -> float | None:
        return self.contest.published(self.name, self.other)


def judgements(contests_found: Sequence[Contest]) -> list[Judgement]:
    """Of all pairs of all contests; all of them together are what the verdicts are
    corrected for.
    """
    pairs = {
        (number, name, other): contest.ratio(name, other)
        for number, contest in enumerate(contests_found)
        for name, other in _pairs(contest)
    }
    verdicts = judged(
        {
            key: Test(
                found.turns,
                (found.middle, found.low, found.high),
                "more" if contests_found[key[0]].measure.more_is_better else "less",
            )
            for key, found in pairs.items()
        }
    )
    made = []
    for (number, name, other), found in pairs.items():
        contest = contests_found[number]
        words = verdict_words(verdicts[number, name, other], found, contest.measure)
        made.append(Judgement(contest, name, other, found, words))
    return made


def _weight(judgement: Judgement) -> float:
    """Clones are what people read, devices are not; figures of others are not what this
    is about; of several measures the first is.
    """
    weight = 30.0 + 10.0 * ("clone" in judgement.name)
    if judgement.contest.rank:
        weight -= 20.0
    return weight if is_ours(judgement.name) else -100.0


def findings(all_judgements: Sequence[Judgement]) -> list[Finding]:
    """Ours against each other peer; those first that say most."""
    made = []
    for each in all_judgements:
        if not each.ratio.known:
            continue
        contest = each.contest
        measure = contest.measure
        position = list(contest.peers).index(each.other)
        mine, theirs = (
            measure.text(median(contest.values(name)))
            for name in (each.name, each.other)
        )
        sentence = f"{workload_words(contest.workload)}: {mine} against {theirs}."
        if each.published is not None:
            sentence += f" Published, on other hardware: {ratio_text(each.published)}."
        made.append(
            Finding(
                f"{ratio_text(each.ratio.middle)}×",
                each.ratio.interval_text,
                f"{each.name} against {each.other}: {each.words}",
                sentence,
                weight=_weight(each) - position,
            )
        )
    return made


def ratio_table(all_judgements: Sequence[Judgement]) -> Table | None:
    """Every one of ours to every peer, with the interval."""
    nouns = {each.contest.measure.noun for each in all_judgements}
    theirs = any(each.published is not None for each in all_judgements)
    ours = any(is_ours(each.name) for each in all_judgements)
    columns: dict[str, Callable[[Judgement], str]] = {
        "workload": lambda each: each.contest.workload,
        "ours" if ours else "peer": lambda each: each.name,
        "peer" if ours else "to": lambda each: each.other,
        "of": lambda each: each.contest.measure.noun,
        "turns": lambda each: str(len(each.ratio.turns)),
        "ratio": lambda each: ratio_text(each.ratio.middle),
        "95 %": lambda each: each.ratio.interval_text or "–",
        "published": lambda each: ratio_text(each.published or math.nan),
        "verdict": lambda each: each.words if each.ratio.known else "no such turns",
    }
    title = "Ratios to each peer"
    if len(nouns) == 1:
        title = f"{title}: {nouns.pop()}"
        del columns["of"]
    if not theirs:
        del columns["published"]
    if not all_judgements:
        return None
    published = " Published: the ratio that others found on other hardware."
    return Table(
        title,
        list(columns),
        [[tell(each) for tell in columns.values()] for each in all_judgements],
        left=list(columns).index("turns"),
        note="Ratio of the medians over the turns that both have; the interval is a "
        "bootstrap one that draws pairs of turns. A difference is told from 5 % and "
        "from six turns on, where the interval leaves 1 out and chance would do the "
        "like in less than 1 of 20 cases (signs of the differences within turns, Holm, "
        f"for all rows).{published if theirs else ''}",
    )
