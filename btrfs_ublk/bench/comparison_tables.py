"""Tables of a comparison: pure functions on its document.

A peer is called faster or slower where three things hold: its ratio to the first peer
is at least 5 % from 1, the 95 % interval of that leaves 1 out, and so does a test with
the signs of the differences within turns, corrected for how many are made (Holm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

from btrfs_ublk.bench.report import OK, Document, Result, Table, number
from btrfs_ublk.bench.stats import (
    bootstrap_interval,
    grouped,
    holm,
    median_of,
    sign_flip_probability,
)

_Key = TypeVar("_Key")

_IOPS = {"name": "iops", "unit": "IOPS", "better": "more", "digits": 0}
#: What is said of bars; others are named by their unit.
_FIGURE_NAMES = {"iops": "I/O per second", "per_core": "I/O per CPU second"}

#: Differences below are not worth telling.
_LEAST_EFFECT = 0.05
_LEVEL = 0.05
SAME, FASTER, SLOWER, UNKNOWN = "same", "faster", "slower", "too few turns"
#: With fewer turns no test comes below the level.
_LEAST_TURNS = 6


def _value(result: Result, figure: str) -> float:
    if figure == "per_core":
        return 1 / result["cpu_us"] if result.get("cpu_us") else 0.0
    return float(result.get(figure) or 0.0)


def _pairs(
    results: Sequence[Result], baseline: Sequence[Result], figure: str
) -> list[tuple[float, float]]:
    """Of the turns that both have. Different runs have turns of the same numbers."""
    below = {(x["run"], x["turn"]): _value(x, figure) for x in baseline}
    both = [
        (_value(x, figure), below[x["run"], x["turn"]])
        for x in results
        if (x["run"], x["turn"]) in below
    ]
    return [pair for pair in both if all(pair)]


def ratio_of(
    results: Sequence[Result], baseline: Sequence[Result], figure: str
) -> tuple[float, float, float]:
    """Of the medians, and its 95 % interval; from the turns that both have."""
    both = _pairs(results, baseline, figure)
    if not both:
        return math.nan, math.nan, math.nan
    values, bases = zip(*both)
    low, high = bootstrap_interval(values, bases, paired=True)
    return median(values) / median(bases), low, high


Verdicts = dict[tuple[str, str, str], str]


def verdicts(document: Document) -> Verdicts:
    """Of each comparison, workload and peer but the first that was measured: how it
    does in the first measure.
    """
    tests: dict[tuple[str, str, str], Test] = {}
    for comparison, workload, by_peer in _groups(document):
        measure = _measures(comparison)[0]
        baseline = _baseline(comparison, by_peer)
        for peer, turns in by_peer.items():
            if peer == baseline:
                continue
            both = _pairs(turns, by_peer[baseline], measure["name"])
            tests[comparison["title"], workload, peer] = Test(
                [value / base for value, base in both],
                ratio_of(turns, by_peer[baseline], measure["name"]),
                measure["better"],
            )
    return judged(tests)


class Test(NamedTuple):
    """The ratio of each turn, that of all with its interval, and whether "more" or
    "less" is better.
    """

    turns: Sequence[float]
    ratio: tuple[float, float, float]
    better: str


def judged(tests: Mapping[_Key, Test]) -> dict[_Key, str]:
    """SAME, FASTER, SLOWER or UNKNOWN. More tests make each of them harder to pass
    (Holm): UNKNOWN is also what would have passed, had there been more turns of the
    same kind.
    """
    found = dict.fromkeys(tests, UNKNOWN)
    enough = [key for key, test in tests.items() if len(test.turns) >= _LEAST_TURNS]
    probabilities = [
        sign_flip_probability([math.log(turn) for turn in tests[key].turns])
        for key in enough
    ]
    for key, alone, corrected in zip(enough, probabilities, holm(probabilities)):
        test = tests[key]
        found[key] = _verdict(test.ratio, corrected, test.better)
        unanimous = alone <= 2.0 ** (1 - len(test.turns)) * (1 + 1e-9)
        if found[key] == SAME and unanimous:
            # All turns agree, so they say no more only because they are too few.
            if _verdict(test.ratio, 0.0, test.better) != SAME:
                found[key] = UNKNOWN
    return found


def _verdict(ratio: tuple[float, float, float], probability: float, better: str) -> str:
    middle, low, high = ratio
    beyond = low > 1 or high < 1
    if not beyond or abs(middle - 1) < _LEAST_EFFECT or probability > _LEVEL:
        return SAME
    return FASTER if (middle > 1) == (better == "more") else SLOWER


def _measures(comparison: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Documents of older versions have only one."""
    measures: Sequence[Mapping[str, Any]] = comparison.get("measures") or [_IOPS]
    return measures


def _groups(
    document: Document,
) -> list[tuple[dict[str, Any], str, dict[str, list[Result]]]]:
    """Comparison, workload, and what was measured of each peer."""
    by_comparison = grouped(document["results"], lambda result: result["comparison"])
    found = []
    for comparison in document["parameters"]["comparisons"]:
        results = by_comparison.get(comparison["title"], [])
        measured = [result for result in results if result["status"] == OK]
        by_workload = grouped(measured, lambda result: result["workload"])
        for workload, turns in by_workload.items():
            by_peer = grouped(turns, lambda result: result["peer"])
            ordered = [name for name in comparison["peers"] if name in by_peer]
            found.append(
                (comparison, workload, {name: by_peer[name] for name in ordered})
            )
    return found


def _baseline(
    comparison: Mapping[str, Any], by_peer: Mapping[str, list[Result]]
) -> str:
    """The first peer that was measured."""
    names: Sequence[str] = comparison["peers"]
    return next(name for name in names if name in by_peer)


def tables(document: Document) -> list[Table]:
    """For each comparison and workload one; the bars; what others have published; what
    was not measured.
    """
    judged = verdicts(document)
    made = []
    bars: list[tuple[str, ...]] = []
    groups = _groups(document)
    for comparison, workload, by_peer in groups:
        make = _fio_table if _measures(comparison)[0]["name"] == "iops" else _table
        made.append(make(comparison, workload, by_peer, judged))
    found = {(x["title"], workload): by_peer for x, workload, by_peer in groups}
    for comparison in document["parameters"]["comparisons"]:
        for bar in comparison["bars"]:
            by_peer = found.get((comparison["title"], bar["workload"]), {})
            bars.append(_bar(comparison, bar, by_peer))
    if bars:
        head = ("bar", "workload", "of", "to", "wanted", "ratio", "95 %", "")
        made.append(Table("Bars", head, bars, left=4))
    published = document["parameters"].get("published")
    if published:
        made.append(_published(published, groups))
    missing = [
        (result["peer"], result.get("workload", "-"), result["reason"].splitlines()[0])
        for result in document["results"]
        if result["status"] != OK
    ]
    if missing:
        made.append(
            Table("Not measured", ("peer", "workload", "reason"), missing, left=3)
        )
    return made


_VERDICT_NOTE = (
    "Verdict, of the first measure: faster or slower by 5 % at least, with an interval "
    "that leaves 1 out, and less likely than 1 in 20 by chance (signs of the "
    "differences within turns, Holm); from 6 turns on, and more where there are many "
    "peers and workloads."
)


def _fio_table(
    comparison: Mapping[str, Any],
    workload: str,
    by_peer: dict[str, list[Result]],
    judged: Verdicts,
) -> Table:
    baseline = _baseline(comparison, by_peer)
    rows = []
    for name, turns in by_peer.items():
        ratio, low, high = ratio_of(turns, by_peer[baseline], "iops")
        per_core, *_ = ratio_of(turns, by_peer[baseline], "per_core")
        rows.append(
            (
                name,
                str(len(turns)),
                number(median_of(turns, "iops")),
                number(ratio, 2),
                _interval(low, high) if name != baseline else "-",
                judged.get((comparison["title"], workload, name), "-"),
                number(median_of(turns, "p50_us"), 1),
                number(median_of(turns, "p99_us"), 1),
                number(median_of(turns, "fio_us"), 1),
                number(median_of(turns, "server_us"), 1),
                number(median_of(turns, "kernel_us"), 1),
                number(per_core, 2),
                number(median_of(turns, "cores"), 2),
                number(median_of(turns, "other_cores"), 2),
            )
        )
    return Table(
        f"{comparison['title']}: {workload}",
        (
            *("peer", "turns", "IOPS", "ratio", "95 %", "verdict", "p50 us", "p99 us"),
            *("fio us", "server us", "kernel us", "per core", "cores", "others"),
        ),
        rows,
        note=f"Medians. Ratio: of the medians, to that of {baseline}, over the turns "
        "that both have, with a bootstrap interval that draws pairs of them. "
        "CPU time per I/O: of the reader, of the server's threads, of the rest of the "
        "kernel; per core: ratio of I/O per CPU second. Cores: in use by these three, "
        f"and by other processes. {_VERDICT_NOTE}",
    )


def _table(
    comparison: Mapping[str, Any],
    workload: str,
    by_peer: dict[str, list[Result]],
    judged: Verdicts,
) -> Table:
    """Whatever the measures are."""
    baseline = _baseline(comparison, by_peer)
    measures = _measures(comparison)
    columns = ["peer", "turns"]
    for measure in measures:
        columns += [_label(measure), "ratio", "95 %"]
    rows = []
    for name, turns in by_peer.items():
        cells = [name, str(len(turns))]
        for measure in measures:
            ratio, low, high = ratio_of(turns, by_peer[baseline], measure["name"])
            cells += [
                number(median_of(turns, measure["name"]), measure["digits"]),
                number(ratio, 2),
                _interval(low, high) if name != baseline else "-",
            ]
        cells.append(judged.get((comparison["title"], workload, name), "-"))
        rows.append(cells)
    return Table(
        f"{comparison['title']}: {workload}",
        [*columns, "verdict"],
        rows,
        note=f"Medians. Ratios: of the medians, to those of {baseline}, over the turns "
        "that both have, with bootstrap intervals that draw pairs of them. "
        f"{_VERDICT_NOTE}",
    )


def _label(measure: Mapping[str, Any]) -> str:
    """ "cold ms" of cold_ms; "seconds" of seconds."""
    label: str = measure["name"].replace("_", " ")
    return label.replace(" mib", " MiB")


def _interval(low: float, high: float) -> str:
    return "-" if low != low else f"{low:.2f} - {high:.2f}"


def _bar(
    comparison: Mapping[str, Any],
    bar: Mapping[str, Any],
    by_peer: Mapping[str, list[Result]],
) -> tuple[str, ...]:
    """NB: always to the first peer: a bar means nothing to another."""
    baseline = comparison["peers"][0]
    ratio, low, high = ratio_of(
        by_peer.get(bar["peer"], []), by_peer.get(baseline, []), bar["of"]
    )
    verdict = "not measured" if ratio != ratio else "missed"
    if ratio >= bar["ratio"]:
        verdict = "met"
    return (
        bar["peer"],
        bar["workload"],
        _FIGURE_NAMES.get(bar["of"], bar["of"]),
        baseline,
        number(bar["ratio"], 2),
        number(ratio, 2),
        _interval(low, high),
        verdict,
    )


def _published(
    published: Mapping[str, Any],
    groups: Sequence[tuple[dict[str, Any], str, dict[str, list[Result]]]],
) -> Table:
    """Theirs, with its ratio to the first figure of the workload; and ours of the same
    two peers, where both were measured.
    """
    ours = {workload: by_peer for _, workload, by_peer in groups}
    first: dict[tuple[str, ...], Mapping[str, Any]] = {}
    rows = []
    for figure in published["figures"]:
        key = (figure["workload"], figure["measure"], figure["setting"])
        base = first.setdefault(key, figure)
        by_peer = ours.get(figure["workload"], {})
        mine = by_peer.get(figure["like"], [])
        value = median_of(mine, figure["measure"])
        ratio, *_ = ratio_of(mine, by_peer.get(base["like"], []), figure["measure"])
        rows.append(
            (
                figure["workload"],
                ", ".join(filter(None, (figure["peer"], figure["setting"]))),
                figure["like"] or "-",
                figure["measure"],
                f"{figure['value']:,g}",
                number(figure["value"] / base["value"], 2),
                f"{value:,.4g}" if value == value else "-",
                number(ratio, 2),
            )
        )
    return Table(
        "Published, on other hardware: compare only ratios",
        (
            *("workload", "theirs", "ours", "measure", "their figure", "ratio"),
            *("our figure", "ratio"),
        ),
        rows,
        left=4,
        note=f"{published['source']}; {published['hardware']}. {published['note']} "
        "Ratios: to the first of the same workload, measure and setting.",
    )
