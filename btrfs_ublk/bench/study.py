"""The common parts of studies. A study is a file with a workload and its tables.
``study()`` makes its command, with the options that all have; ``Column`` and
``table()`` declare its tables.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from btrfs_ublk.base.capabilities import Capability, require
from btrfs_ublk.base.entry import stacked
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.stats import grouped, median_of, ratio_of

_Item = TypeVar("_Item")
Option = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Column:
    """One column of figures. ``of`` is the key whose median is shown, or a function of
    all results of a row. With ``best``, the least value is added in parentheses.
    """

    head: str
    of: str | Callable[[Sequence[Result]], float | str]
    digits: int = 0
    scale: float = 1.0
    best: bool = False

    def cell(self, results: Sequence[Result]) -> str:
        if callable(self.of):
            found = self.of(results)
            return found if isinstance(found, str) else self._number(found)
        if results and isinstance(results[0].get(self.of), str):
            return str(results[0][self.of])
        text = self._number(median_of(results, self.of))
        if not self.best:
            return text
        return f"{text} ({self._number(min(each[self.of] for each in results))})"

    def _number(self, value: float) -> str:
        return number(value * self.scale, self.digits)


TURNS = Column("turns", len)
LOAD = Column("load", "load", 1)


def ratio(results: Sequence[Result], against: str, measure: str) -> Column:
    """Make the column of ratios to the subject ``against``, with their 95 % intervals,
    of pairs within a turn: the more the better, also where seconds are measured.
    """

    def of(turns: Sequence[Result]) -> str:
        found = [x for x in results if x["subject"] == against]
        same = [x for x in found if x.get("unit") == turns[0].get("unit")]
        pair = [same or found, turns]
        # Of seconds, less is more.
        mine, base = pair if measure == "seconds" else reversed(pair)
        middle, low, high, _ = ratio_of(mine, base, measure)
        text = number(middle, 2)
        return text if low != low else f"{text} ({low:.2f}-{high:.2f})"

    return Column(f"to {against}", of)


def table(
    title: str,
    results: Iterable[Result],
    names: Mapping[str, Callable[[Result], str]],
    columns: Sequence[Column],
    *,
    left: int = 1,
    note: str = "",
) -> Table:
    """Make a table with one row for all results with equal ``names``."""
    groups = grouped(results, lambda each: tuple(name(each) for name in names.values()))
    rows = [
        (*row, *(column.cell(its) for column in columns)) for row, its in groups.items()
    ]
    return Table(title, (*names, *(each.head for each in columns)), rows, left, note)


def listing(
    title: str,
    results: Iterable[Result],
    columns: Sequence[Column],
    *,
    left: int = 1,
    note: str = "",
) -> Table:
    """Make a table with one row for each result."""
    rows = [tuple(column.cell([each]) for column in columns) for each in results]
    return Table(title, [column.head for column in columns], rows, left, note)


@dataclass(frozen=True)
class Run:
    """One run of a study, whose results it collects."""

    document: Document
    parent: Path
    repeats: int
    _about: Result = field(default_factory=dict)

    def drawn(self, plan: Sequence[_Item], *, tell: bool = True) -> Iterator[_Item]:
        """Yield all of the plan in each turn, in an order that is drawn anew. Results
        that are added then have the turn, and the load at the beginning.
        """
        chances = random.Random(1)
        for turn in range(1, self.repeats + 1):
            for each in chances.sample(plan, len(plan)):
                self._about.update(turn=turn, load=os.getloadavg()[0])
                yield each
            if tell:
                options.progress(f"turn {turn} of {self.repeats}")

    def add(self, result: Result) -> None:
        self.document["results"].append(result | self._about)


def study(
    name: str,
    *given: Option,
    needs: Sequence[Capability] = (),
    repeats: int | None = 1,
    in_memory: bool = False,
    recorded: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
    tables: Callable[[Document], list[Table]] | None = None,
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command from a function, which gets a ``Run`` and the values of the
    ``given`` options. The document's parameters are the values of the ``recorded``
    options, and ``about``. A study outside of this package gives its ``tables``.

    With ``in_memory``, its directory is for objects, maps and caches; otherwise, for
    sparse images.
    """

    def make(function: Callable[..., None]) -> click.Command:
        def run(as_json: bool, parent: Path, **values: Any) -> None:
            require(*needs)
            parameters = {each: values[each] for each in recorded} | dict(about or {})
            document = make_document(
                name, parameters=parameters, directory=parent, results=[]
            )
            turns = values.pop("repeats", 1)
            function(Run(document, parent, turns), **values)
            if tables is not None:
                document["tables"] = [asdict(each) for each in tables(document)]
            finish(document, as_json=as_json)

        added = stacked(*given, options.common_options(repeats, in_memory))
        settings: Any = {"help": function.__doc__, "context_settings": options.SETTINGS}
        made: click.Command = click.command(**settings)(added(run))
        return made

    return make
