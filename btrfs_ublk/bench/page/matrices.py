"""The results of a matrix as charts and tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from btrfs_ublk.bench.page.charts import Chart, measured_line
from btrfs_ublk.bench.page.comparisons import Block
from btrfs_ublk.bench.page.inputs import MatrixData
from btrfs_ublk.bench.page.measures import IOPS
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
        made.append(Block(title, intro, [*_charts(rows)], [*tables(part)]))
    return made


def _charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw every run, by engine and depth, and by number of jobs."""
    ways = grouped(rows, lambda row: f"{row['fio.engine']} ×{row['fio.depth']}")
    for way, its in sorted(ways.items()):
        by_jobs = grouped(its, lambda row: int(row["fio.jobs"]))
        lines = [
            measured_line(
                "1 job" if jobs == 1 else f"{jobs} jobs",
                [float(row["total_iops"]) for row in by_jobs[jobs]],
                IOPS,
                True,
            )
            for jobs in sorted(by_jobs)
        ]
        yield Chart(way, "reads per second, more is better", lines)
