"""What campaigns share: options, rounds, files of results, tables and conclusions.

The parameters in a file of results have the names of the options that set them, so
that `btrfs-ublk bench report` can say how a file was made.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from btrfs_ublk.base.entry import PathType
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE, VOLUMES_VARIABLE
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    make_document,
    show,
    to_text,
)
from btrfs_ublk.bench.stats import quantile
from btrfs_ublk.bench.study import Column, table
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.store import IMAGES_VARIABLE

# What tests share, and scripts, for campaigns that are run as programs.
_TESTS = Path(__file__).parents[1]
sys.path += [str(_TESTS), str(_TESTS.parent / "scripts/lib")]

#: What names the directories that commands use: by name below that of a campaign.
_PLACES = {
    RUN_VARIABLE: "run",
    VOLUMES_VARIABLE: "volumes",
    IMAGES_VARIABLE: "images",
    CONFIG_VARIABLE: "etc",
    "BTRFS_UBLK_STATE_DIR": "state",
}

_BEGUN_S = time.monotonic()
_SHOWN_FAULTS = 20

SETTINGS = options.SETTINGS
COUNT = options.COUNT

T = TypeVar("T")

seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=1, help="Of all chances."
)
limit_option = click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=0),
    default=math.inf,
    metavar="SECONDS",
    help="After that no round is begun.",
)
deadline_option = click.option(
    "--deadline",
    "deadline_s",
    type=click.IntRange(min=1),
    default=60,
    metavar="SECONDS",
    help="What takes longer hangs.",
)
other_option = click.option(
    "--other",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=sys.executable,
    metavar="PYTHON",
    help="The interpreter of the build that upgrades are to, and from.  [this one]",
)
#: For campaigns without disks: a directory that all files fit in.
parent_option = click.option(
    "--parent",
    type=PathType(exists=True, file_okay=False),
    default="/dev/shm",
    help="Directory for files, on tmpfs, XFS or btrfs.",
)
output_option = click.option(
    *("-o", "output"),
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file for the results, as JSON.",
)


def kind_option(kinds: Iterable[str], otherwise: str = "all in turn") -> Any:
    """Make the option that chooses kinds of rounds; the command gets ``only``."""
    return click.option(
        *("--kind", "only"),
        type=click.Choice(list(kinds)),
        multiple=True,
        help=f"Only such rounds.  [default: {otherwise}]",
    )


def in_turn(kinds: Iterable[T], rounds: int) -> list[T]:
    """Return the kind of each round."""
    chosen = list(kinds)
    return [chosen[number % len(chosen)] for number in range(rounds)]


def run_rounds(
    kinds: Sequence[str],
    bed: Callable[[], AbstractContextManager[Callable[[str, Result], object]]],
    *,
    limit_s: float,
    last: Sequence[str] = (),
) -> Generator[Result, None, None]:
    """Yield the result of a round of each kind, whose "problems" are its failures.

    ``bed`` makes all that rounds need, and yields what does one. After a round with a
    problem, or of a kind that is the ``last`` one of a bed, there is another bed.
    """
    end_s = time.monotonic() + limit_s
    numbered = list(enumerate(kinds, 1))
    while numbered and time.monotonic() < end_s:
        with bed() as do:
            while numbered and time.monotonic() < end_s:
                number, kind = numbered.pop(0)
                result: Result = {"what": "round", "number": number, "kind": kind}
                result["problems"] = []
                try:
                    do(kind, result)
                except BtrfsUblkError as error:
                    result["problems"].append(f"ended early: {error}")
                yield result
                if result["problems"] or kind in last:
                    break


def summed(key: str, head: str = "") -> Column:
    """Make a column of sums of numbers, or of how many there are in lists."""

    def of(results: Sequence[Result]) -> float:
        found = (each.get(key, 0) for each in results)
        return sum(len(x) if isinstance(x, (list, dict)) else x for x in found)

    return Column(head or key.replace("_", " "), of)


def timed(key: str, share: float, head: str, digits: int, scale: float = 1.0) -> Column:
    """Make a column of a quantile of seconds, of those results that have them."""

    def of(results: Sequence[Result]) -> float:
        times = sorted(each[key] for each in results if key in each)
        return quantile(times, share) if times else math.nan

    return Column(head, of, digits, scale)


def by_kind(
    title: str,
    results: Sequence[Result],
    columns: Sequence[Column],
    *,
    kinds: Callable[[Result], Sequence[str]] = lambda result: [result["kind"]],
    note: str = "",
) -> Table:
    """Make a table with a row for each kind of round, and one for all."""
    rows = [each | {"row": kind} for each in results for kind in kinds(each)]
    rows += [each | {"row": "all"} for each in results]
    failed = Column("failed", lambda its: sum(bool(x["problems"]) for x in its))
    names = {"kind": lambda result: str(result["row"])}
    return table(
        title, rows, names, [Column("rounds", len), *columns, failed], note=note
    )


def conclude(faults: Sequence[str], *, rounds: int, seed: int | None = None) -> None:
    """Say how a campaign went, and how to repeat it. Raises BtrfsUblkError for faults.
    Without a seed, it leaves nothing to chance."""
    name = Path(sys.argv[0]).stem.replace("_", "-")
    words = ["scripts/torture", name, *sys.argv[1:]]
    if seed is not None and not any(word.startswith("--seed") for word in words):
        words += ["--seed", str(seed)]
    took_s = time.monotonic() - _BEGUN_S
    by = "" if seed is None else f" with seed {seed}"
    said = f"{name}: {rounds} rounds{by} in {took_s:.0f} s, {len(faults)} failures"
    if not faults and rounds >= 10:
        # With no event in N trials, the rate is below 3/N, with 95 % confidence.
        said += f", so less than {3 / rounds:.2g} of all rounds fail (95 %)"
    click.echo(f"{said}\nagain: {shlex.join(words)}", err=True)
    if faults:
        raise BtrfsUblkError(
            f"{len(faults)} failures: " + "; ".join(faults[:_SHOWN_FAULTS])
        )


def _problems(document: Document) -> list[str]:
    return [
        f"round {result['number']}: {each}" if "number" in result else each
        for result in document["results"]
        for each in result["problems"]
    ]


class Results:
    """What a campaign finds, result by result: the file of results has all of them
    after each one. Leaving the block shows the tables, also after a failure.

    A result is a dictionary; ``faults`` says what of all of them are failures, by
    default what they have as ``problems``.
    """

    def __init__(
        self,
        name: str,
        tables: Callable[[Document], Sequence[Table]],
        *,
        parameters: dict[str, Any],
        directory: Path,
        output: Path | None,
        faults: Callable[[Document], list[str]] = _problems,
    ) -> None:
        self.rounds = 0
        self._tables, self._output, self._faults = tables, output, faults
        self.document = make_document(
            name, parameters=parameters, directory=directory, results=[]
        )
        script = f"tests/campaigns/{name.replace('-', '_')}.py"
        self.document["script"] = script

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.document["results"]:
            self._store()
            show(self.document)

    def _store(self) -> None:
        """Put the tables into the document, as no module of the package makes them, and
        write the file."""
        made = self._tables(self.document)
        self.document["tables"] = [asdict(each) for each in made]
        if self._output is not None:
            self._output.write_text(to_text(self.document) + "\n")

    @property
    def faults(self) -> list[str]:
        return self._faults(self.document)

    def add(self, result: dict[str, Any], *, rounds: int = 1) -> None:
        """Add a result, which took so many rounds."""
        self.rounds += rounds
        self.document["results"].append(result)
        self._store()

    def add_all(
        self, rounds: Generator[Result, None, None], tell: Callable[[Result], str]
    ) -> None:
        """Add the result of each round, and print its problems, or what ``tell`` says
        of it. Whatever happens, ``rounds`` ends before we return."""
        with closing(rounds):
            for result in rounds:
                self.add(result)
                words = "; ".join(result["problems"]) or tell(result)
                options.progress(f"round {result['number']}: {result['kind']}: {words}")

    def conclude(self, *, seed: int | None = None) -> None:
        """Say how it went, see conclude()."""
        conclude(self.faults, rounds=self.rounds, seed=seed)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables for a time."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def repeated(do: Callable[[], None], *, pause_s: float = 0.0) -> Iterator[None]:
    """Do it again and again, in a thread, with a pause before each time."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(pause_s):
            do()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def apart(directory: Path) -> Iterator[None]:
    """Have directories of our own for all that commands keep, to keep off others."""
    for place in _PLACES.values():
        (directory / place).mkdir(mode=0o700)
    with environment(**{x: str(directory / place) for x, place in _PLACES.items()}):
        yield
