"""``btrfs-ublk bench matrix``: many runs, in a file that survives crashes.

They are made in blocks. Each runs every configuration once, in an order given by a
seed; later ones omit those whose median is known well enough.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from statistics import median

import click

from btrfs_ublk.base.capabilities import Fio, require
from btrfs_ublk.base.entry import PathType, SecondsType
from btrfs_ublk.base.gc import collect
from btrfs_ublk.bench import options
from btrfs_ublk.bench.config import SOURCES, Configuration, configuration_of
from btrfs_ublk.bench.environment import environment
from btrfs_ublk.bench.matrices import MATRICES, Matrix, describe, parse_filters, run_key
from btrfs_ublk.bench.results import ResultsFile, open_results
from btrfs_ublk.bench.run import FAILED, OK, SKIPPED, VOID, Row, run_configuration
from btrfs_ublk.bench.stats import bootstrap_interval
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.server import FrontEndName, choose_front_end

_TOLERANCE = 0.03
#: What is done again with --retry.
_AGAIN = (FAILED, SKIPPED)


@dataclass(frozen=True)
class Progress:
    """The progress after a run, or at the beginning: ``row`` is None then, and as long
    as runs were only found in the file.
    """

    done: int
    #: The runs planned so far; more blocks may be needed.
    planned: int
    block: int
    left_s: float | None
    row: Row | None = None


def is_settled(rows: Sequence[Row], *, least: int, most: int, tolerance: float) -> bool:
    """Whether a configuration has been run often enough: ``most`` times; or ``least``
    times, with the 95 % interval of the median of its IOPS within ``tolerance`` (a
    share) of it, or with failures only.
    """
    if len(rows) >= most:
        return True
    if len(rows) < least:
        return False
    values = [row["total_iops"] for row in rows if row["status"] == OK]
    if not values:
        return True
    low, high = bootstrap_interval(values)
    middle = median(values)
    # Comparisons with NaN, of a single value, are false.
    return bool(max(high - middle, middle - low) <= tolerance * middle)


@dataclass
class Runner:
    """Makes those runs of a matrix that a file of results does not have yet; with
    ``retry``, also those that failed or were skipped.
    """

    matrix: Matrix
    results: ResultsFile
    _: KW_ONLY
    selected: Sequence[Configuration]
    environment: str
    seed: int
    tolerance: float
    measure: Callable[[Configuration], Row]
    retry: bool = False
    _durations: list[float] = field(default_factory=list)

    def _done(self, configuration: Configuration, block: int) -> Row | None:
        key = run_key(configuration, environment=self.environment, block=block)
        return self.results.rows.get(key)

    def _rows_before(self, configuration: Configuration, block: int) -> list[Row]:
        rows = [self._done(configuration, earlier) for earlier in range(1, block)]
        return [row for row in rows if row is not None]

    def plan(self, block: int) -> list[Configuration]:
        """Plan a block. The plan depends on earlier blocks only, so that resuming in
        the middle of a block continues with the same plan.
        """
        return [
            configuration
            for configuration in self.matrix.order(block, seed=self.seed)
            if configuration in self.selected
            and not is_settled(
                self._rows_before(configuration, block),
                least=self.matrix.least,
                most=self.matrix.most,
                tolerance=self.tolerance,
            )
        ]

    def run(self) -> Iterator[Progress]:
        """Make all runs; yields the progress after each, and at the beginning."""
        done = 0
        for block in range(1, self.matrix.most + 1):
            plan = self.plan(block)
            if not plan:
                break
            later = len(self.selected) * max(0, self.matrix.least - block)
            for position, configuration in enumerate(plan):
                to_come = len(plan) - position + later
                found = self._done(configuration, block)
                if found is None or (self.retry and found["status"] in _AGAIN):
                    if not self._durations:
                        yield self._progress(done, to_come, block)
                    row = self._run(configuration, block)
                    yield self._progress(done + 1, to_come - 1, block, row)
                done += 1

    def _run(self, configuration: Configuration, block: int) -> Row:
        start_s = time.monotonic()
        row = self.measure(configuration)
        row = self.results.append_run(row, block=block)
        self._durations.append(time.monotonic() - start_s)
        return row

    def _progress(
        self, done: int, to_come: int, block: int, row: Row | None = None
    ) -> Progress:
        left_s = None
        if self._durations:
            left_s = to_come * sum(self._durations) / len(self._durations)
        return Progress(done, done + to_come, block, left_s, row)


@click.command("matrix", context_settings=options.SETTINGS)
@click.option(
    "--matrix",
    "name",
    type=click.Choice(list(MATRICES)),
    default="full",
    help="full takes hours, quick minutes.",
)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="KEY=VALUE",
    help="Only these configurations; a key given twice may have either value.",
)
@click.option(
    "-o",
    "--output",
    type=PathType(dir_okay=False),
    help="File of results; an existing one is gone on with.  [benchmark-MATRIX.jsonl]",
)
@click.option("--seed", default=1, help="Decides the order of the runs.")
@click.option("--min-repeats", type=options.COUNT, help="Of each.  [the matrix's]")
@click.option("--max-repeats", type=options.COUNT, help="Of each.  [the matrix's]")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=_TOLERANCE,
    help="From the least number of repeats on, a configuration is settled when the "
    "95 % interval of its median is within this share of it.",
)
@click.option(
    "--front-end",
    type=click.Choice(["auto", "ublk", "fuse"]),
    default="auto",
    help="auto: ublk where the kernel has it, and survives the server's death.",
)
@click.option(
    "--source",
    type=click.Choice(SOURCES),
    help="What answers reads of the virtual data.  [memset]",
)
@click.option(
    "--runtime",
    "runtime_s",
    type=SecondsType(min=0.5),
    metavar="SECONDS",
    help="Of each run.  [the matrix's]",
)
@click.option("--retry", is_flag=True, help="Do what failed or was skipped again.")
@options.parent_option
def command(
    name: str,
    filters: Sequence[str],
    output: Path | None,
    seed: int,
    min_repeats: int | None,
    max_repeats: int | None,
    tolerance: float,
    front_end: FrontEndName,
    source: str | None,
    runtime_s: float | None,
    retry: bool,
    parent: Path,
) -> int:
    """Run a matrix of configurations.

    In blocks: each has every configuration once, in random order. Every run is a JSON
    line in the file of results, and on disk before the next begins. Interrupted or
    killed, the same command goes on.

    full: the 96 configurations, 10 to 30 times 10 s each: hours. quick: 17, 3 times 2 s
    each: minutes. Exit status 1: a run failed or was void, or none was good; 3: this
    machine can do none of them.
    """
    matrix = MATRICES[name].with_options(
        front_end=choose_front_end(front_end).name,
        source=source,
        runtime_s=runtime_s,
        least=min_repeats,
        most=max_repeats,
    )
    selected = matrix.selected(parse_filters(filters))
    _require_an_engine(selected)
    path = output or Path(f"benchmark-{name}.jsonl")
    record = environment(parent)

    def measure(configuration: Configuration) -> Row:
        return run_configuration(configuration, parent=parent, environment=record)

    with open_results(path, matrix, seed=seed) as results:
        collect()  # leftovers of a killed run would disturb the figures
        runner = Runner(
            matrix,
            results,
            selected=selected,
            environment=results.note_environment(record),
            seed=seed,
            tolerance=tolerance,
            measure=measure,
            retry=retry,
        )
        try:
            _show(matrix, runner.run())
        except KeyboardInterrupt:
            click.echo(f"{path} has what was done; the same command goes on", err=True)
            raise
        return _finish(path, list(results.rows.values()))


def _require_an_engine(selected: Sequence[Configuration]) -> None:
    """Raise CapabilityError if fio can run none of the configurations. If it can run
    some, the rows of the others say so.
    """
    engines = [Fio(name) for name in sorted({each.engine for each in selected})]
    if all(engine.probe() is not None for engine in engines):
        require(*engines)


def _finish(path: Path, rows: Sequence[Row]) -> int:
    counts = Counter(row["status"] for row in rows)
    text = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    click.echo(f"{path}: {len(rows)} runs: {text}", err=True)
    click.echo(f"tables: btrfs-ublk bench summarize < {path}", err=True)
    if rows and counts[SKIPPED] == len(rows):
        return CapabilityError.exit_status
    return 1 if counts[FAILED] or counts[VOID] or not counts[OK] else 0


def duration(seconds: float) -> str:
    """Format a duration: "42 s", "7 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _line(progress: Progress) -> str:
    row = progress.row
    assert row is not None
    what = (
        f"{row['total_iops']:,.0f} IOPS"
        if row["status"] == OK
        else f"{row['status']}: {row['reason'].splitlines()[0]}"
    )
    left = "" if progress.left_s is None else f"; {duration(progress.left_s)} left"
    return (
        f"{progress.done} of {progress.planned}, block {progress.block}: "
        f"{describe(configuration_of(row))}: {what}{left}"
    )


def _show(matrix: Matrix, steps: Iterable[Progress]) -> None:
    for step in steps:
        if step.row is None:
            text = f"matrix {matrix.name}: {step.done} of {step.planned} runs done"
            options.progress(text)
        else:
            options.progress(_line(step))
