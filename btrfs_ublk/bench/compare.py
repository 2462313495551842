"""Tables of a comparison: pure functions on its document."""

from collections.abc import Mapping, Sequence
from typing import Any

from btrfs_ublk.bench.report import OK, Document, Result, Table, number
from btrfs_ublk.bench.stats import Ratio, grouped, median_of, ratio_of
from btrfs_ublk.bench.study import Column

#: What comparisons measure now; those of earlier versions have other measures, too.
IOPS = {"name": "iops", "unit": "IOPS", "better": "more", "digits": 0}
#: The names of figures in the table of bars; others keep their own name.
_FIGURE_NAMES = {"iops": "I/O per second", "per_core": "I/O per CPU second"}


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
    every = groups(document)
    made = [_table(*group) for group in every]
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


#: Columns of fio's figures, after the ratio.
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
        for column in _FIO_COLUMNS if by_fio else ():
            if column.of == "per_core":
                per_core = ratio_of(turns, by_peer[baseline], "per_core")
                cells.append(number(per_core.middle, column.digits))
            else:
                cells.append(column.cell(turns))
        rows.append(cells)
    heads = [head for each in measures for head in (_label(each), "ratio", "95 %")]
    more = [column.head for column in _FIO_COLUMNS] if by_fio else []
    return Table(
        f"{comparison['title']}: {workload}",
        ["peer", "turns", *heads, *more],
        rows,
        note=f"Medians. Ratio: of the medians, to that of {baseline}, over the turns "
        "that both have, with a bootstrap interval that draws pairs of them."
        f"{_FIO_NOTE if by_fio else ''}",
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
    reached = "missed" if ratio.turns else "not measured"
    if ratio.middle >= bar["ratio"]:
        reached = "met"
    return (
        bar["peer"],
        bar["workload"],
        _FIGURE_NAMES.get(bar["of"], bar["of"]),
        baseline,
        number(bar["ratio"], 2),
        number(ratio.middle, 2),
        _interval(ratio),
        reached,
    )
