"""Summaries of a matrix: pure functions from rows to comparisons, and to text.

In each group of runs, the configuration with the highest 75th percentile of IOPS
counts, as in the benchmark that the matrix is from: it shows how fast something can be.
The median of the same configuration and its 95 % interval are shown beside it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from btrfs_ublk.bench.config import REQUIRED, Configuration, configuration_of
from btrfs_ublk.bench.environment import QUIET_CORES
from btrfs_ublk.bench.matrices import check_version
from btrfs_ublk.bench.report import Table, number
from btrfs_ublk.bench.stats import bootstrap_interval, grouped, median_of
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import parse_size

Row = dict[str, Any]

_SEED = ("btrfs.seed", "btrfs.virtual_data_size", "btrfs.total_clone_size")
_JOBS = ("fio.jobs", "ublk.num_queues")
#: The value for rows that do not have the key, such as other programs' rows.
_UNSAID = "-"
_HEADINGS = {
    "btrfs.seed": "seed",
    "btrfs.virtual_data_size": "virtual data",
    "btrfs.total_clone_size": "clones",
    "fio.depth": "depth",
    "fio.engine": "engine",
    "fio.jobs": "jobs",
    "ublk.num_queues": "queues",
}


@dataclass(frozen=True)
class Comparison:
    """The keys that are compared, and those that must be equal. With ``varied``, only
    engines are compared that were run with several values of the former.
    """

    title: str
    alike: tuple[str, ...]
    compared: tuple[str, ...]
    varied: bool = False


COMPARISONS = (
    Comparison("Seed, virtual data and clones, by engine", ("fio.engine",), _SEED),
    Comparison("Size of the virtual data, by engine", ("fio.engine",), _SEED[1:2]),
    Comparison("Kind of seed, by engine", ("fio.engine",), _SEED[:1]),
    Comparison("Size of the clones, by engine", ("fio.engine",), _SEED[2:]),
    Comparison(
        "Depth, by engine and jobs",
        ("fio.engine", "fio.jobs"),
        ("fio.depth",),
        varied=True,
    ),
    Comparison(
        "Jobs and queues, by engine and size of the clones",
        ("fio.engine", "btrfs.total_clone_size"),
        _JOBS,
    ),
)


@dataclass(frozen=True)
class Figure:
    """Figures of the best configuration of a group; all but counts are IOPS."""

    values: Mapping[str, Any]
    p75: float
    median: float
    interval: tuple[float, float]
    runs: int
    configurations: int
    best: Configuration


@dataclass(frozen=True)
class Part:
    """The runs of one environment, front end and source, which may be compared."""

    environment: str
    front_end: str
    source: str
    statuses: Mapping[str, int]
    reasons: Mapping[str, int]
    comparisons: Sequence[tuple[Comparison, Sequence[Figure]]]
    #: Of each engine's best configuration with a number of jobs: medians.
    costs: Sequence[Mapping[str, Any]]
    #: The number of counted runs that other programs disturbed.
    disturbed: int = 0

    @property
    def warning(self) -> str | None:
        """A warning to print before the figures; None if there is none."""
        count = self.statuses.get("ok", 0)
        if not count or self.disturbed * 2 <= count:
            return None
        return (
            "These figures are worthless as times: other processes used more than "
            f"{QUIET_CORES} CPU cores in {self.disturbed} of {count} runs. Repeat it "
            "on a machine that does nothing else."
        )


@dataclass(frozen=True)
class Parsed:
    """The content of a file of results: the last line of a matrix, None for bare runs;
    runs, environments by id, and whether the last line was torn, and so left out.
    """

    header: Row | None
    rows: Sequence[Row]
    environments: Mapping[str, Row]
    torn: bool


def parse_rows(text: str) -> Parsed:
    """Parse the runs in JSON lines: those of a file of results, and bare ones, which
    have the nine keys, total_iops and job_iops. Of lines with the same key, the last
    counts; of concatenated files, each has its own keys.

    Raises UsageError, naming the line, for anything else, and when there is no run.
    """
    rows: dict[object, Row] = {}
    environments: dict[str, Row] = {}
    header: Row | None = None
    begin = 0
    lines = text.split("\n")
    torn = False
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            # Complete lines end with a newline, so the last part is then empty.
            if place == len(lines):
                torn = True
                continue
            raise UsageError(f"line {place} is no JSON: {line[:80]!r}") from error
        kind = row.get("kind") if isinstance(row, dict) else None
        if kind == "matrix":
            check_version(row, f"line {place}")
            header, begin = row, place
        elif kind == "environment":
            environments[str(row.get("id"))] = row
        else:
            _check_row(row, place)
            rows[begin, row.get("key", place)] = row
    if not rows:
        raise UsageError(
            "there is no run to summarise", hint="give a file of results on stdin"
        )
    return Parsed(header, list(rows.values()), environments, torn)


def _check_row(row: object, place: int) -> None:
    if not isinstance(row, dict) or row.get("kind", "run") != "run":
        raise UsageError(f"line {place} is no run: {str(row)[:80]}")
    missing = [key for key in (*REQUIRED, "total_iops") if key not in row]
    if missing:
        raise UsageError(f"line {place} is no run: it has no {', '.join(missing)}")
    try:
        configuration_of(row)
    except UsageError as error:
        raise UsageError(f"line {place}: {error.message}") from error
    if not isinstance(row.get("key", ""), str):
        raise UsageError(f"line {place}: its key is {row['key']!r}, not a text")
    iops = row["total_iops"]
    is_number = isinstance(iops, int | float) and not isinstance(iops, bool)
    if row.get("status", "ok") == "ok" and not (is_number and iops >= 0):
        raise UsageError(f"line {place}: total_iops is {iops!r}, not a rate")


def p75(values: Sequence[float]) -> float:
    """Return the 75th percentile, interpolated between values if needed."""
    if len(values) == 1:
        return float(values[0])
    return float(quantiles(values, n=4, method="inclusive")[2])


def figure(rows: Sequence[Row], keys: Sequence[str]) -> Figure:
    """Summarise a group of rows that have equal values of ``keys``."""
    configurations = grouped(rows, configuration_of)
    values = {
        each: [float(row["total_iops"]) for row in its_rows]
        for each, its_rows in configurations.items()
    }
    best = max(values, key=lambda each: p75(values[each]))
    common = configuration_of(rows[0]).to_dict()
    return Figure(
        values={key: common[key] for key in keys},
        p75=p75(values[best]),
        median=median(values[best]),
        interval=bootstrap_interval(values[best]),
        runs=len(values[best]),
        configurations=len(configurations),
        best=best,
    )


def compare(comparison: Comparison, rows: Sequence[Row]) -> list[Figure]:
    """Return a figure for each combination of values, in order."""

    def values(row: Row, keys: Sequence[str]) -> tuple[Any, ...]:
        its = configuration_of(row).to_dict()
        return tuple(its[key] for key in keys)

    def order(found: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            parse_size(value) if key.endswith("_size") else value
            for key, value in zip(keys, found)
        )

    keys = (*comparison.alike, *comparison.compared)
    if comparison.varied:
        engines = grouped(rows, lambda row: row["fio.engine"]).values()
        several = [
            its
            for its in engines
            if len({values(row, comparison.compared) for row in its}) > 1
        ]
        rows = [row for its in several for row in its]
    groups = grouped(rows, lambda row: values(row, keys))
    return [figure(groups[found], keys) for found in sorted(groups, key=order)]


def costs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the cost of each engine's best runs by jobs, from rows that have it."""
    told = [row for row in rows if row.get("cpu") and row.get("latency_us")]
    found = []
    groups = grouped(told, lambda row: (row["fio.engine"], row["fio.jobs"]))
    for (engine, jobs), group in sorted(groups.items()):
        best = figure(group, ()).best
        its_rows = [row for row in group if configuration_of(row) == best]

        def medians(name: str) -> dict[str, float]:
            values = [row[name] for row in its_rows]
            return {key: median_of(values, key) for key in values[0]}

        cost = {"engine": engine, "jobs": jobs, "depth": best.depth}
        cost |= {"cores": medians("cpu"), "us_per_io": medians("cpu_us_per_io")}
        found.append(cost | {"latency_us": medians("latency_us")})
    return found


def _part_of(row: Row) -> tuple[str, str, str]:
    environment, front_end, source = (
        str(row.get(key, _UNSAID)) for key in ("environment", "front_end", "source")
    )
    return environment, front_end, source


def summarize(rows: Iterable[Row]) -> list[Part]:
    """Summarise runs. Only those with status "ok", or without one, count."""
    parts = []
    parts_of = sorted(grouped(rows, _part_of).items())
    for (environment, front_end, source), group in parts_of:
        by_status = grouped(group, lambda row: row.get("status", "ok"))
        good = by_status.get("ok", [])
        reasons = [
            f"{row['status']}: {str(row.get('reason', _UNSAID)).splitlines()[0]}"
            for row in group
            if row.get("status", "ok") != "ok"
        ]
        parts.append(
            Part(
                environment,
                front_end,
                source,
                statuses={name: len(its) for name, its in by_status.items()},
                reasons=Counter(reasons),
                comparisons=[(each, compare(each, good)) for each in COMPARISONS],
                costs=costs(good),
                disturbed=sum(map(_is_disturbed, good)),
            )
        )
    return parts


def _is_disturbed(row: Row) -> bool:
    others = (row.get("cpu") or {}).get("other")
    return isinstance(others, int | float) and others > QUIET_CORES


def tables(part: Part) -> Iterator[Table]:
    """Make tables of comparisons, of costs, and of runs that do not count."""
    for comparison, figures in part.comparisons:
        if figures:
            yield _comparison_table(comparison, figures)
    if part.costs:
        yield _cost_table(part.costs)
    if part.reasons:
        rows = [(reason, str(count)) for reason, count in part.reasons.items()]
        yield Table("Runs that do not count", ("reason", "runs"), rows)


def _comparison_table(comparison: Comparison, figures: Sequence[Figure]) -> Table:
    keys = (*comparison.alike, *comparison.compared)

    def values(each: Figure, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(str(each.values[key]) for key in keys)

    rows = []
    for alike in grouped(figures, lambda x: values(x, comparison.alike)).values():
        leader = max(each.p75 for each in alike)
        for each in alike:
            low, high = each.interval
            rows.append(
                (
                    *values(each, keys),
                    number(each.p75),
                    number(each.p75 / leader if leader else float("nan"), 2),
                    number(each.median),
                    "-" if each.runs < 2 else f"{number(low)} .. {number(high)}",
                    str(each.runs),
                    _best_text(each, keys),
                )
            )
    columns = ("75 %", "of best", "median", "95 % interval", "runs", "configuration")
    return Table(
        comparison.title,
        (*(_HEADINGS[key] for key in keys), *columns),
        rows,
        left=len(keys),
        note="IOPS of the configuration whose 75th percentile is highest. Of best: "
        "to the highest of the group.",
    )


def _best_text(each: Figure, keys: Sequence[str]) -> str:
    """Describe the best configuration by keys that are no columns."""
    values = each.best.to_dict()
    texts = {
        "btrfs.seed": values["btrfs.seed"],
        "btrfs.virtual_data_size": values["btrfs.virtual_data_size"],
        "btrfs.total_clone_size": f"/{values['btrfs.total_clone_size']}",
        "fio.depth": f"x{values['fio.depth']}",
        "fio.jobs": f"{values['fio.jobs']} jobs",
        "ublk.num_queues": f"{values['ublk.num_queues']} queues",
    }
    left = [text for key, text in texts.items() if key not in keys]
    return f"{' '.join(left)}, 1 of {each.configurations}"


def _cost_table(costs_found: Sequence[Mapping[str, Any]]) -> Table:
    parts = ("total", "fio", "server", "rest")
    quantiles = ("p50", "p99", "p99.99")

    def numbers(values: Mapping[str, float], names: Sequence[str], digits: int) -> Any:
        return (number(values.get(name, float("nan")), digits) for name in names)

    return Table(
        "What the best runs cost",
        (
            *("engine", "jobs", "depth"),
            *(f"{part} cores" for part in parts),
            *(f"{part} us" for part in parts),
            *(f"{quantile} us" for quantile in quantiles),
        ),
        [
            (
                *(cost["engine"], str(cost["jobs"]), str(cost["depth"])),
                *numbers(cost["cores"], parts, 2),
                *numbers(cost["us_per_io"], parts, 1),
                *numbers(cost["latency_us"], quantiles, 0),
            )
            for cost in costs_found
        ],
        note="Medians. us: of CPU per read; the last three are latencies. Rest: the "
        "kernel's threads, interrupts, and whatever else ran.",
    )
