"""Running a matrix in blocks. Each runs every configuration once, in an order given by
a seed; later ones omit those whose median is known well enough.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from btrfs_ublk.bench.config import Configuration
from btrfs_ublk.bench.matrices import Matrix, run_key
from btrfs_ublk.bench.results import ResultsFile
from btrfs_ublk.bench.run import FAILED, OK, REJECTED, SKIPPED, Row
from btrfs_ublk.bench.stats import bootstrap_interval

Measure = Callable[[Configuration], Row]


@dataclass(frozen=True)
class Progress:
    """The progress after a run, or at the beginning: ``row`` is None then, and as long
    as runs were only found in the file.
    """

    done: int
    #: The runs planned so far; more blocks may be needed, up to ``most``.
    planned: int
    most: int
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
        return all(row["status"] != REJECTED for row in rows)
    low, high = bootstrap_interval(values)
    middle = median(values)
    # Comparisons with NaN, of a single value, are false.
    return bool(max(high - middle, middle - low) <= tolerance * middle)


class Runner:
    """Makes those runs of a matrix that a file of results does not have yet."""

    def __init__(
        self,
        matrix: Matrix,
        results: ResultsFile,
        *,
        selected: Sequence[Configuration],
        environment: str,
        seed: int,
        tolerance: float,
        measure: Measure,
        retry: bool = False,
    ) -> None:
        self.matrix = matrix
        self._results = results
        self._selected = set(selected)
        self._environment = environment
        self._seed = seed
        self._tolerance = tolerance
        self._measure = measure
        self._again = {FAILED, SKIPPED} if retry else set()
        self._durations: list[float] = []

    def _done(self, configuration: Configuration, block: int) -> Row | None:
        key = run_key(configuration, environment=self._environment, block=block)
        return self._results.rows.get(key)

    def _rows_before(self, configuration: Configuration, block: int) -> list[Row]:
        rows = [self._done(configuration, earlier) for earlier in range(1, block)]
        return [row for row in rows if row is not None]

    def plan(self, block: int) -> list[Configuration]:
        """Plan a block. The plan depends on earlier blocks only, so that resuming in
        the middle of a block continues with the same plan.
        """
        return [
            configuration
            for configuration in self.matrix.order(block, seed=self._seed)
            if configuration in self._selected
            and not is_settled(
                self._rows_before(configuration, block),
                least=self.matrix.least,
                most=self.matrix.most,
                tolerance=self._tolerance,
            )
        ]

    def run(self) -> Iterator[Progress]:
        """Make all runs; yields the progress after each, and at the beginning."""
        done = 0
        for block in range(1, self.matrix.most + 1):
            plan = self.plan(block)
            if not plan:
                break
            later = len(self._selected) * max(0, self.matrix.least - block)
            for position, configuration in enumerate(plan):
                to_come = len(plan) - position + later
                found = self._done(configuration, block)
                if found is None or found["status"] in self._again:
                    if not self._durations:
                        yield self._progress(done, to_come, block)
                    row = self._run(configuration, block)
                    yield self._progress(done + 1, to_come - 1, block, row)
                done += 1

    def _run(self, configuration: Configuration, block: int) -> Row:
        start_s = time.monotonic()
        row = self._measure(configuration)
        row = self._results.append_run(row, block=block)
        self._durations.append(time.monotonic() - start_s)
        return row

    def _progress(
        self, done: int, to_come: int, block: int, row: Row | None = None
    ) -> Progress:
        left_s = None
        if self._durations:
            left_s = to_come * sum(self._durations) / len(self._durations)
        most = len(self._selected) * self.matrix.most
        return Progress(done, done + to_come, most, block, left_s, row)


def shell_script(
    matrix: Matrix, *, selected: Container[Configuration], seed: int
) -> Iterator[str]:
    """Yield the lines of a script that makes the runs, each ``most`` times, in the
    order of their blocks.
    """
    yield "#!/bin/sh"
    yield f"# Matrix {matrix.name}, seed {seed}: one JSON line for each run, on stdout."
    yield ': "${BENCHMARK:=btrfs-ublk bench run}"'
    for block in range(1, matrix.most + 1):
        for configuration in matrix.order(block, seed=seed):
            if configuration in selected:
                options = json.dumps(configuration.to_dict())
                yield f"$BENCHMARK --json-opts {shlex.quote(options)}"
