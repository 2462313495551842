"""The results of a matrix as plots and tables."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from btrfs_ublk.bench.page.comparisons import Block, measured_line
from btrfs_ublk.bench.page.inputs import MatrixData
from btrfs_ublk.bench.page.measures import IOPS, ratio_text
from btrfs_ublk.bench.page.plots import Line, Plot
from btrfs_ublk.bench.report import Table, number
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.bench.summarize import summarize, tables

Row = Mapping[str, Any]


def matrix_blocks(data: MatrixData) -> list[Block]:
    """Make a block for each front end and source."""
    made: list[Block] = []
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
        plots = [*_plots(rows), *_gains_plots(rows)]
        made.append(Block(title, intro, plots, [*tables(part)], [_runs_table(rows)]))
    return made


def _way(row: Row) -> str:
    return f"{row['fio.engine']} ×{row['fio.depth']}"


def _kind(row: Row) -> str:
    size = row["btrfs.virtual_data_size"]
    return f"{row['btrfs.seed']} {size}, clone {row['btrfs.total_clone_size']}"


def _rates(rows: Sequence[Row]) -> list[float]:
    return [float(row["total_iops"]) for row in rows]


def _plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Plot every run, by engine and depth, and by number of jobs."""
    for way, its in sorted(grouped(rows, _way).items()):
        by_jobs = grouped(its, lambda row: int(row["fio.jobs"]))
        lines = [
            measured_line(f"{jobs} jobs", _rates(by_jobs[jobs]), IOPS, True)
            for jobs in sorted(by_jobs)
        ]
        yield Plot(way, "Reads per second (more is better)", lines=lines)


def _gains_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Plot the gain of several jobs over one, by engine and jobs. Only configurations
    that differ in nothing but jobs and queues are compared; the one with the most reads
    is taken.
    """
    best: dict[tuple[str, int], tuple[float, Line]] = {}
    for _, alike in grouped(rows, lambda x: (_way(x), _kind(x))).items():
        by_jobs = grouped(alike, lambda x: int(x["fio.jobs"]))
        one = median(_rates(by_jobs.pop(1, [])) or [0.0])
        for jobs, its in by_jobs.items() if one > 0 else ():
            engine, most = str(alike[0]["fio.engine"]), median(_rates(its))
            line = Line(
                f"{engine}, {jobs} jobs",
                [value / one for value in _rates(its)],
                f"{ratio_text(most / one)}×",
                True,
                most / one,
            )
            if (engine, jobs) not in best or best[engine, jobs][0] < most:
                best[engine, jobs] = most, line
    if best:
        title = "Gain from more jobs"
        axis = "Times the IOPS of one job (right is better)"
        lines = [best[key][1] for key in sorted(best)]
        yield Plot(title, axis, lines=lines, ratios=True)


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
