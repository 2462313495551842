"""The results of a matrix as plots, tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from btrfs_ublk.bench.matrices import PUBLISHED
from btrfs_ublk.bench.page.comparisons import Block, Finding, original
from btrfs_ublk.bench.page.inputs import MatrixData
from btrfs_ublk.bench.page.measures import is_number, quantity, ratio_text
from btrfs_ublk.bench.page.plots import Line, Plot, Rows, Scatter, Series
from btrfs_ublk.bench.report import Table, number
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.bench.summarize import summarize, tables

Row = Mapping[str, Any]

_READS = "Reads per second"
#: With a larger ratio of the largest to the least, an axis from zero hides much.
_WIDE = 30.0


def matrix_blocks(data: MatrixData) -> tuple[list[Block], list[Finding]]:
    """Make a block for each front end and source; also returns the findings."""
    made: list[Block] = []
    findings: list[Finding] = []
    for part in summarize(data.rows):
        rows = [
            row
            for row in data.rows
            if row.get("status", "ok") == "ok"
            and str(row.get("front_end", "-")) == part.front_end
            and str(row.get("source", "-")) == part.source
        ]
        title = "4 KiB random reads of a clone"
        if part.front_end != "-":
            title += f": front end {part.front_end}, source {part.source}"
        counts = ", ".join(f"{count} {name}" for name, count in part.statuses.items())
        intro = [f"Runs: {counts}.", *([part.warning] if part.warning else [])]
        gains = list(_gains(rows))
        plots = [*_scaling_plots(rows), *_cores_plots(rows), *_gains_plots(gains)]
        shown = [*tables(part), *([_gains_table(gains), _theirs()] if gains else [])]
        made.append(Block(title, intro, plots, shown, [_runs_table(rows)]))
        findings += _findings(title, gains)
    return made, findings


def _way(row: Row) -> str:
    return f"{row['fio.engine']} ×{row['fio.depth']}"


def _kind(row: Row) -> str:
    size = row["btrfs.virtual_data_size"]
    return f"{row['btrfs.seed']} {size}, clone {row['btrfs.total_clone_size']}"


def _scaling_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Plot every run over the number of jobs, by engine and depth."""
    for way, its in sorted(grouped(rows, _way).items()):
        series = [
            Series(
                kind,
                [(float(x["fio.jobs"]), float(x["total_iops"])) for x in group],
                True,
            )
            for kind, group in sorted(grouped(its, _kind).items())
        ]
        jobs = sorted({float(row["fio.jobs"]) for row in its})
        title = f"{way}: scaling with jobs"
        yield Scatter(title, _READS, x_axis="Jobs", series=series, x_ticks=jobs)


def _cores_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    told = [x for x in rows if x.get("cpu") and is_number(x["cpu"].get("total"))]

    def point(row: Row) -> tuple[float, float]:
        cores = float(row["cpu"]["total"]) - float(row["cpu"].get("other") or 0.0)
        return cores, float(row["total_iops"])

    series = [
        Series(way, [point(row) for row in its])
        for way, its in sorted(grouped(told, _way).items())
    ]
    rates = [float(row["total_iops"]) for row in told if row["total_iops"] > 0]
    wide = bool(rates) and max(rates) > _WIDE * min(rates)
    axis = "CPU cores in use, without those of other programs"
    if series:
        yield Scatter(
            "What reads cost", _READS, x_axis=axis, series=series, y_logarithmic=wide
        )


class Gain(NamedTuple):
    """The gain of several jobs over one, for a configuration that was run with both: of
    medians, and of each run with several jobs.
    """

    engine: str
    jobs: int
    configuration: str
    iops: float
    ratio: float
    runs: Sequence[float]

    @property
    def published(self) -> float | None:
        theirs = PUBLISHED.get(self.engine, {})
        return theirs[self.jobs] / theirs[1] if self.jobs in theirs else None


def _gains(rows: Sequence[Row]) -> Iterator[Gain]:
    """Yield a gain by engine and jobs. Only configurations that differ in nothing but
    jobs and queues are compared; the one with the most reads is taken.
    """
    found: list[Gain] = []
    for (way, kind), alike in grouped(rows, lambda x: (_way(x), _kind(x))).items():
        by_jobs = grouped(alike, lambda x: int(x["fio.jobs"]))
        rates = {n: [float(x["total_iops"]) for x in by_jobs[n]] for n in by_jobs}
        one = median(rates.pop(1, [0.0]))
        for jobs, its in rates.items() if one > 0 else ():
            most = median(its)
            runs = [value / one for value in its]
            engine = str(alike[0]["fio.engine"])
            found.append(Gain(engine, jobs, f"{way}, {kind}", most, most / one, runs))
    groups = grouped(found, lambda each: (each.engine, each.jobs))
    for key in sorted(groups):
        yield max(groups[key], key=lambda each: each.iops)


def _gains_plots(gains: Sequence[Gain]) -> Iterator[Plot]:
    lines = [
        Line(
            f"{each.engine}, {each.jobs} jobs",
            each.runs,
            f"{ratio_text(each.ratio)}×",
            True,
            each.ratio,
            published=each.published,
        )
        for each in gains
    ]
    if lines:
        title = "Gain from more jobs, ours and published"
        axis = "Times the IOPS of one job (right is better)"
        yield Rows(title, axis, lines=lines, ratios=True)


def _gains_table(gains: Sequence[Gain]) -> Table:
    return Table(
        "Ours beside the published figures",
        ("engine", "jobs", "configuration", "ours", "to 1 job", "published"),
        [
            (
                *(each.engine, str(each.jobs), each.configuration),
                *(number(each.iops), ratio_text(each.ratio)),
                ratio_text(each.published or float("nan")),
            )
            for each in gains
        ],
        left=3,
        note="Ours: median IOPS of the configuration that reads most with so many "
        "jobs, and its ratio to the same with one job. Published: that ratio on other "
        "hardware, of the best configurations.",
    )


def _theirs() -> Table:
    rows = [
        [engine, *(f"{value / 1e3:,.0f}" for value in figures.values())]
        for engine, figures in PUBLISHED.items()
    ]
    note = (
        "Thousand IOPS of the best configuration. mmap: warm, from the page cache. "
        "Kind of seed and size of the virtual data: 2 % of a difference at most."
    )
    columns = ("engine", "1 job", "2 jobs", "6 jobs", "12 jobs")
    title = f"Published, on other hardware ({original()['hardware']})"
    return Table(title, columns, rows, note=note)


def _runs_table(rows: Sequence[Row]) -> Table:
    columns = ("configuration", "jobs", "queues", "block", "IOPS", "cores", "p99 µs")
    cells = [
        (
            f"{_way(row)}, {_kind(row)}",
            *(str(row[key]) for key in ("fio.jobs", "ublk.num_queues")),
            *(str(row.get("block", "–")), number(float(row["total_iops"]))),
            number(float((row.get("cpu") or {}).get("total", "nan")), 2),
            number(float((row.get("latency_us") or {}).get("p99", "nan"))),
        )
        for row in rows
    ]
    return Table("Every run that counts", columns, cells)


def _findings(title: str, gains: Sequence[Gain]) -> Iterator[Finding]:
    """Find the gain from more jobs where each engine reads most."""
    for place, its in enumerate(grouped(gains, lambda each: each.engine).values()):
        best = max(its, key=lambda each: each.iops)
        ratio = f"{ratio_text(best.ratio)}×"
        yield Finding(
            ratio,
            f"{quantity(best.iops)} IOPS",
            f"{best.engine}: {best.jobs} jobs read {ratio} what one reads",
            f"{title}: medians of {best.configuration}.",
            5.0 - place,
        )
