"""What a matrix of runs found, as plots, tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from btrfs_ublk.bench.page.inputs import MatrixData
from btrfs_ublk.bench.page.measures import is_number, measure_named, ratio_text
from btrfs_ublk.bench.page.published import MATRIX_BESTS, MATRIX_HARDWARE
from btrfs_ublk.bench.page.shapes import (
    Block,
    Finding,
    Line,
    Plot,
    Rows,
    Scatter,
    Series,
)
from btrfs_ublk.bench.report import Table, number
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.bench.summarize import Part, figure, summarize, tables

Row = Mapping[str, Any]

_IOPS = measure_named("total_iops")
#: From this ratio of the largest to the least on, an axis from zero would hide much.
_WIDE = 30.0


def parts_of(data: MatrixData) -> list[tuple[Part, list[dict[str, Any]]]]:
    """What may be compared, and its runs that count."""
    made = []
    for part in summarize(data.rows):
        rows = [
            row
            for row in data.rows
            if row.get("status", "ok") == "ok"
            and str(row.get("front_end", "-")) == part.front_end
            and str(row.get("source", "-")) == part.source
        ]
        made.append((part, rows))
    return made


def blocks(data: MatrixData) -> list[Block]:
    """One for each front end and source."""
    made = []
    for part, rows in parts_of(data):
        title = "4 KiB random reads of a clone"
        if part.front_end != "-":
            title += f": front end {part.front_end}, source {part.source}"
        counts = ", ".join(f"{count} {name}" for name, count in part.statuses.items())
        plots: list[Plot] = []
        if rows:
            plots += _scaling_plots(rows)
            plots += _cores_plots(rows)
            plots += _published_plots(rows)
        shown = list(tables(part))
        if rows:
            shown.append(_published_table(rows))
        made.append(
            Block(title, [f"Runs: {counts}."], plots, shown, [_runs_table(rows)])
        )
    return made


def _way(row: Row) -> str:
    return f"{row['fio.engine']} ×{row['fio.depth']}"


def _kind(row: Row) -> str:
    return (
        f"{row['btrfs.seed']} {row['btrfs.virtual_data_size']}, "
        f"clone {row['btrfs.total_clone_size']}"
    )


def configuration_text(row: Row) -> str:
    """Differs for runs of different configurations."""
    return (
        f"{_way(row)}, {_kind(row)}, {row['fio.jobs']} jobs, "
        f"{row['ublk.num_queues']} queues, {row['fio.direct']}, {row['fio.runtime']}"
    )


def _scaling_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """One for each engine and depth: every run, by the number of jobs."""
    for way, its in sorted(grouped(rows, _way).items()):
        jobs = sorted({float(row["fio.jobs"]) for row in its})
        series = [
            Series(
                kind,
                [(float(row["fio.jobs"]), float(row["total_iops"])) for row in group],
                joined=True,
            )
            for kind, group in sorted(grouped(its, _kind).items())
        ]
        yield Scatter(f"{way}: scaling with jobs", "Jobs", _IOPS.title, series, jobs)


def _cores_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    told = [
        row for row in rows if row.get("cpu") and is_number(row["cpu"].get("total"))
    ]
    if not told:
        return
    series = [
        Series(
            way,
            [(_cores(row["cpu"]), float(row["total_iops"])) for row in its],
        )
        for way, its in sorted(grouped(told, _way).items())
    ]
    rates = [float(row["total_iops"]) for row in told if row["total_iops"] > 0]
    yield Scatter(
        "What reads cost",
        "CPU cores in use, without those of other programs",
        _IOPS.title,
        series,
        y_logarithmic=bool(rates) and max(rates) > _WIDE * min(rates),
    )


def _cores(cpu: Mapping[str, Any]) -> float:
    return float(cpu["total"]) - float(cpu.get("other") or 0.0)


def _bests(rows: Sequence[Row]) -> dict[str, dict[int, tuple[float, list[float]]]]:
    """By engine and jobs: the 75th percentile of the best configuration, and all its
    runs.
    """
    found: dict[str, dict[int, tuple[float, list[float]]]] = {}
    groups = grouped(rows, lambda row: (str(row["fio.engine"]), int(row["fio.jobs"])))
    for (engine, jobs), its in sorted(groups.items()):
        best = figure([dict(row) for row in its], ())
        keys = best.best.to_dict()
        values = [
            float(row["total_iops"])
            for row in its
            if all(row.get(key, value) == value for key, value in keys.items())
        ]
        found.setdefault(engine, {})[jobs] = (best.p75, values)
    return found


def _published_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """How much more several jobs read than one, here and there."""
    lines = []
    for engine, by_jobs in _bests(rows).items():
        if 1 not in by_jobs or not by_jobs[1][0]:
            continue
        one = by_jobs[1][0]
        theirs = MATRIX_BESTS.get(engine, {})
        for jobs, (best, values) in by_jobs.items():
            if jobs == 1:
                continue
            published = theirs[jobs] / theirs[1] if jobs in theirs else None
            lines.append(
                Line(
                    f"{engine}, {jobs} jobs",
                    [value / one for value in values],
                    best / one,
                    float("nan"),
                    float("nan"),
                    f"{ratio_text(best / one)}×",
                    "ours",
                    published,
                )
            )
    if lines:
        yield Rows(
            "Gain from more jobs, ours and published",
            "Times the IOPS of one job (right is better)",
            lines,
            ratios=True,
        )


def _published_table(rows: Sequence[Row]) -> Table:
    shown = []
    for engine, by_jobs in _bests(rows).items():
        theirs = MATRIX_BESTS.get(engine, {})
        ones = (by_jobs.get(1, (0.0, []))[0], theirs.get(1, 0.0))
        for jobs, (best, _) in by_jobs.items():
            there = theirs.get(jobs, float("nan"))
            shown.append(
                (
                    engine,
                    str(jobs),
                    number(best),
                    ratio_text(best / ones[0]) if ones[0] else "–",
                    number(there),
                    ratio_text(there / ones[1]) if ones[1] else "–",
                )
            )
    return Table(
        "Ours beside the published figures",
        ("engine", "jobs", "ours", "to 1 job", "published", "to 1 job"),
        shown,
        note="IOPS: 75th percentile of the best configuration. Published: other "
        f"hardware ({MATRIX_HARDWARE}), so compare the ratios, not the figures.",
    )


def _runs_table(rows: Sequence[Row]) -> Table:
    return Table(
        "Every run that counts",
        ("configuration", "jobs", "queues", "block", "IOPS", "cores", "p99 µs"),
        [
            (
                f"{_way(row)}, {_kind(row)}",
                str(row["fio.jobs"]),
                str(row["ublk.num_queues"]),
                str(row.get("block", "–")),
                number(float(row["total_iops"])),
                number(float((row.get("cpu") or {}).get("total", "nan")), 2),
                number(float((row.get("latency_us") or {}).get("p99", "nan"))),
            )
            for row in rows
        ],
    )


def findings(data: MatrixData) -> list[Finding]:
    """How fast the best is, and what more jobs bring."""
    made = []
    for part, rows in parts_of(data):
        bests = _bests(rows)
        served = "" if part.front_end == "-" else f", front end {part.front_end}"
        for position, (engine, by_jobs) in enumerate(bests.items()):
            most = max(by_jobs, key=lambda jobs: by_jobs[jobs][0])
            best, values = by_jobs[most]
            gain = ""
            if 1 in by_jobs and most != 1 and by_jobs[1][0]:
                gain = f", {ratio_text(best / by_jobs[1][0])} times as many as one"
            jobs_text = "one job reads" if most == 1 else f"{most} jobs read"
            made.append(
                Finding(
                    _short(best),
                    f"IOPS, median {_short(median(values))}",
                    f"{engine}: {jobs_text} most{gain}",
                    f"4 KiB random reads of a clone{served}: the 75th percentile of "
                    "the best configuration.",
                    weight=5.0 - position,
                )
            )
    return made


def _short(value: float) -> str:
    """ "215k" """
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"
