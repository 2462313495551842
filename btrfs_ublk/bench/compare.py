"""Tables of a comparison: pure functions on its document.

A peer is called faster or slower if three things hold: its ratio to the first peer is
at least 5 % from 1; the ratio's 95 % interval excludes 1; and so does a test with the
signs of the differences within turns, corrected for the number of tests (Holm).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from btrfs_ublk.bench.report import OK, Document, Result, Table, number
from btrfs_ublk.bench.stats import (
    Ratio,
    grouped,
    holm,
    median_of,
    ratio_of,
    sign_flip_probability,
)
from btrfs_ublk.bench.study import Column

_Key = TypeVar("_Key")

#: What comparisons measure now; those of earlier versions have other measures, too.
IOPS = {"name": "iops", "unit": "IOPS", "better": "more", "digits": 0}
#: The names of figures in the table of bars; others keep their own name.
_FIGURE_NAMES = {"iops": "I/O per second", "per_core": "I/O per CPU second"}

#: Smaller differences are not reported.
_LEAST_EFFECT = 0.05
_LEVEL = 0.05
SAME, FASTER, SLOWER, UNKNOWN = "same", "faster", "slower", "too few turns"
#: With fewer turns, no test can reach the level.
_LEAST_TURNS = 6


Verdicts = dict[tuple[str, str, str], str]


def verdicts(document: Document) -> Verdicts:
    """Return the verdict on the first measure for each comparison, workload and peer
    except the first peer that was measured.
    """
    tests: dict[tuple[str, str, str], tuple[Ratio, str]] = {}
    for comparison, workload, by_peer in groups(document):
        measure = _measures(comparison)[0]
        baseline, *others = by_peer
        for peer in others:
            ratio = ratio_of(by_peer[peer], by_peer[baseline], measure["name"])
            tests[comparison["title"], workload, peer] = ratio, measure["better"]
    return judged(tests)


def judged(tests: Mapping[_Key, tuple[Ratio, str]]) -> dict[_Key, str]:
    """Return SAME, FASTER, SLOWER or UNKNOWN for each ratio, of which "more" or "less"
    is better. More tests make each of them harder to pass (Holm), so UNKNOWN is also
    returned for a test that would have passed with more turns of the same kind.
    """
    found = dict.fromkeys(tests, UNKNOWN)
    enough = {key: x for key, x in tests.items() if len(x[0].turns) >= _LEAST_TURNS}
    probabilities = [
        sign_flip_probability([math.log(turn) for turn in ratio.turns])
        for ratio, _ in enough.values()
    ]
    for key, alone, corrected in zip(enough, probabilities, holm(probabilities)):
        ratio, better = tests[key]
        found[key] = _verdict(ratio, corrected, better)
        unanimous = alone <= 2.0 ** (1 - len(ratio.turns)) * (1 + 1e-9)
        # All turns agree, so only their number keeps this from a verdict.
        if found[key] == SAME and unanimous and _verdict(ratio, 0.0, better) != SAME:
            found[key] = UNKNOWN
    return found


def _verdict(ratio: Ratio, probability: float, better: str) -> str:
    beyond = ratio.low > 1 or ratio.high < 1
    if not beyond or abs(ratio.middle - 1) < _LEAST_EFFECT or probability > _LEVEL:
        return SAME
    return FASTER if (ratio.middle > 1) == (better == "more") else SLOWER


def _measures(comparison: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return a comparison's measures; documents of older versions have only one."""
    measures: Sequence[Mapping[str, Any]] = comparison.get("measures") or [IOPS]
    return measures


def groups(
    document: Document,
) -> list[tuple[dict[str, Any], str, dict[str, list[Result]]]]:
    """Return each comparison and workload with the results of each peer that was
    measured; all are compared with the first.
    """
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


def tables(document: Document) -> list[Table]:
    """Make a table for each comparison and workload; then of the bars, and of what was
    not measured.
    """
    found = verdicts(document)
    every = groups(document)
    made = [_table(*group, found) for group in every]
    measured = {(x["title"], workload): by_peer for x, workload, by_peer in every}
    bars = [
        _bar(x, bar, measured.get((x["title"], bar["workload"]), {}))
        for x in document["parameters"]["comparisons"]
        for bar in x["bars"]
    ]
    if bars:
        head = ("bar", "workload", "of", "to", "wanted", "ratio", "95 %", "")
        made.append(Table("Bars", head, bars, left=4))
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


#: Columns of fio's figures, after the verdict.
_FIO_COLUMNS = (
    Column("p50 us", "p50_us", 1),
    Column("p99 us", "p99_us", 1),
    Column("fio us", "fio_us", 1),
    Column("server us", "server_us", 1),
    Column("kernel us", "kernel_us", 1),
    Column("per core", "per_core", 2),
    Column("cores", "cores", 2),
    Column("others", "other_cores", 2),
)
_FIO_NOTE = (
    " CPU time per I/O: of the reader, of the server's threads, of the rest of the "
    "kernel; per core: ratio of I/O per CPU second. Cores: in use by these three, and "
    "by other processes."
)


def _table(
    comparison: Mapping[str, Any],
    workload: str,
    by_peer: dict[str, list[Result]],
    judged: Verdicts,
) -> Table:
    """Show each measure with its ratio; for fio, also its other figures."""
    baseline = next(iter(by_peer))
    measures = _measures(comparison)
    by_fio = measures[0]["name"] == "iops"
    rows = []
    for name, turns in by_peer.items():
        cells = [name, str(len(turns))]
        for measure in measures:
            ratio = ratio_of(turns, by_peer[baseline], measure["name"])
            cells += [
                number(median_of(turns, measure["name"]), measure["digits"]),
                number(ratio.middle, 2),
                _interval(ratio) if name != baseline else "-",
            ]
        cells.append(judged.get((comparison["title"], workload, name), "-"))
        for column in _FIO_COLUMNS if by_fio else ():
            if column.of == "per_core":
                per_core = ratio_of(turns, by_peer[baseline], "per_core")
                cells.append(number(per_core.middle, column.digits))
            else:
                cells.append(column.cell(turns))
        rows.append(cells)
    heads = [head for each in measures for head in (_label(each), "ratio", "95 %")]
    more = [column.head for column in _FIO_COLUMNS] if by_fio else []
    one = "Ratio: of the medians, to that of", "a bootstrap interval that draws"
    many = "Ratios: of the medians, to those of", "bootstrap intervals that draw"
    ratio_words, interval_words = one if by_fio else many
    return Table(
        f"{comparison['title']}: {workload}",
        ["peer", "turns", *heads, "verdict", *more],
        rows,
        note=f"Medians. {ratio_words} {baseline}, over the turns that both have, with "
        f"{interval_words} pairs of them.{_FIO_NOTE if by_fio else ''} {_VERDICT_NOTE}",
    )


def _label(measure: Mapping[str, Any]) -> str:
    """Make a heading: "cold ms" of cold_ms, "seconds" of seconds."""
    label: str = measure["name"].replace("_", " ")
    return label.replace(" mib", " MiB").replace("iops", "IOPS")


def _interval(ratio: Ratio) -> str:
    low, high = ratio.low, ratio.high
    return "-" if low != low else f"{low:.2f} - {high:.2f}"


def _bar(
    comparison: Mapping[str, Any],
    bar: Mapping[str, Any],
    by_peer: Mapping[str, list[Result]],
) -> tuple[str, ...]:
    """NB: a bar is always a ratio to the first peer, even if that was not measured."""
    baseline = comparison["peers"][0]
    mine, theirs = (by_peer.get(name, []) for name in (bar["peer"], baseline))
    ratio = ratio_of(mine, theirs, bar["of"])
    verdict = "not measured" if not ratio.turns else "missed"
    if ratio.middle >= bar["ratio"]:
        verdict = "met"
    return (
        bar["peer"],
        bar["workload"],
        _FIGURE_NAMES.get(bar["of"], bar["of"]),
        baseline,
        number(bar["ratio"], 2),
        number(ratio.middle, 2),
        _interval(ratio),
        verdict,
    )
