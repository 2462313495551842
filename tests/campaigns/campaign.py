"""What campaigns share: a command with its options, the loop of rounds, what they find
and how they report it.

The parameters in a file of results have the names of the options that set them, so
that `btrfs-ublk bench report` can say how a file was made.
"""

import math
import os
import random
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from btrfs_ublk.base.capabilities import FUSE, ROOT, UBLK, Capability, require
from btrfs_ublk.base.entry import PathType, stacked
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
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import FrontEndName

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

COUNT = options.COUNT

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
    places = {name: str(directory / x) for name, x in _PLACES.items()}
    with patch.dict(os.environ, places):
        yield


# Tables.


def summed(key: str, head: str = "") -> Column:
    """Make a column of sums of numbers, or of how many there are in lists."""

    def of(results: Sequence[Result]) -> float:
        found = (each.get(key, 0) for each in results)
        return sum(len(x) if isinstance(x, (list, dict)) else x for x in found)

    return Column(head or key.replace("_", " "), of)


def timed(key: str, share: float, head: str, digits: int, scale: float = 1.0) -> Column:
    """Make a column of a quantile of seconds, of those results that have some."""

    def of(results: Sequence[Result]) -> float:
        found = (each[key] for each in results if key in each)
        times = sorted(y for x in found for y in (x if isinstance(x, list) else [x]))
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


# A run.


@dataclass
class Run:
    """One run of a campaign: what it was asked for, and what it has found. Its results
    are dictionaries, and their ``problems`` are failures."""

    name: str
    #: Of a campaign that has files: its own directory, else the one for others.
    directory: Path
    stack: ExitStack
    document: Document
    output: Path | None
    make_tables: Callable[[Document], Sequence[Table]] | None
    rounds: int
    seed: int | None
    end_s: float  #: No round begins later (time.monotonic()).
    kinds: Sequence[str]
    front_end: FrontEndName
    done: int = 0
    chances: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chances = random.Random(self.seed)

    def in_time(self) -> bool:
        return time.monotonic() < self.end_s

    def add(self, result: Result, *, rounds: int = 1) -> None:
        """Add a result, which took so many rounds. The file of results has all of them
        after each one."""
        self.done += rounds
        self.document["results"].append(result)
        if self.make_tables is not None:
            # No module of the package makes them.
            made = self.make_tables(self.document)
            self.document["tables"] = [asdict(each) for each in made]
        if self.output is not None:
            self.output.write_text(to_text(self.document) + "\n")

    def do_rounds(
        self,
        bed: Callable[[Result], AbstractContextManager[Callable[[Result], object]]],
        tell: Callable[[Result], str],
        *,
        session: float = math.inf,
        last: Sequence[str] = (),
    ) -> None:
        """Do a round of each kind in turn, and print its problems, or what ``tell``
        says of it.

        ``bed`` makes all that rounds need, and yields what does one. It gets a result
        of its own, which has its ``problems``: what it finds at its end, say. After
        ``session`` rounds, one with a problem, or one of a kind that is the ``last``
        one of a bed, there is another bed.
        """
        numbered = [
            (number, self.kinds[(number - 1) % len(self.kinds)])
            for number in range(1, self.rounds + 1)
        ]
        while numbered and self.in_time():
            of_bed: Result = {"what": "bed", "problems": []}
            with bed(of_bed) as do:
                in_bed = 0
                while numbered and in_bed < session and self.in_time():
                    number, kind = numbered.pop(0)
                    result: Result = {"what": "round", "number": number, "kind": kind}
                    result["problems"] = []
                    try:
                        do(result)
                    except BtrfsUblkError as error:
                        result["problems"].append(f"ended early: {error}")
                    self.add(result)
                    words = "; ".join(result["problems"]) or tell(result)
                    options.progress(f"round {number}: {kind}: {words}")
                    in_bed += 1
                    if result["problems"] or kind in last:
                        break
            if of_bed["problems"]:
                self.add(of_bed | {"kind": "afterwards"}, rounds=0)
                options.progress(f"afterwards: {'; '.join(of_bed['problems'])}")

    def problems(self) -> list[str]:
        """Return all failures so far."""
        return [
            f"round {result['number']}: {each}" if "number" in result else each
            for result in self.document["results"]
            for each in result["problems"]
        ]


def _conclude(run: Run) -> None:
    """Say how a campaign went, and how to repeat it. Raises BtrfsUblkError for
    failures. Without a seed, it leaves nothing to chance."""
    problems = run.problems()
    words = ["scripts/torture", run.name, *sys.argv[1:]]
    if run.seed is not None and not any(word.startswith("--seed") for word in words):
        words += ["--seed", str(run.seed)]
    took_s = time.monotonic() - _BEGUN_S
    by = "" if run.seed is None else f" with seed {run.seed}"
    said = f"{run.name}: {run.done} rounds{by} in {took_s:.0f} s"
    said += f", {len(problems)} failures"
    if not problems and run.done >= 10:
        # With no event in N trials, the rate is below 3/N, with 95 % confidence.
        said += f", so less than {3 / run.done:.2g} of all rounds fail (95 %)"
    click.echo(f"{said}\nagain: {shlex.join(words)}", err=True)
    if problems:
        shown = "; ".join(problems[:_SHOWN_FAULTS])
        raise BtrfsUblkError(f"{len(problems)} failures: {shown}")


def command(
    name: str,
    *given: Callable[..., Any],
    tables: Callable[[Document], Sequence[Table]] | None = None,
    needs: Sequence[Capability] = (ROOT,),
    rounds: int | None = None,
    kinds: Iterable[str] = (),
    seeded: bool = True,
    front_ends: bool = False,
    on_disks: bool = True,
    has_directory: bool = True,
    recorded: Sequence[str] = (),
) -> Callable[[Callable[..., None]], click.Command]:
    """Make the command of a campaign from a function, which gets a ``Run``, and the
    values of the ``given`` options; the parameters of its document are the number of
    ``rounds``, unless None, its seed, and the ``recorded`` options.

    ``kinds``: of its rounds; --kind chooses some. ``on_disks``: its files are
    images, otherwise any. ``has_directory``: commands keep all in a directory that the
    campaign has to itself.
    """
    kinds = list(kinds)
    mine = list(given)
    if front_ends:
        mine.append(
            click.option(
                "--front-end", type=click.Choice(["fuse", "ublk"]), default="fuse"
            )
        )
    if rounds is not None:
        mine.append(click.option("--rounds", type=COUNT, default=rounds))
    if kinds:
        mine.append(
            click.option(
                *("--kind", "only"),
                type=click.Choice(kinds),
                multiple=True,
                help="Only such rounds.  [default: all in turn]",
            )
        )
    if seeded:
        mine.append(
            click.option(
                "--seed", type=click.IntRange(min=0), default=1, help="Of all chances."
            )
        )
    limit = click.option(
        "--limit",
        "limit_s",
        type=click.FloatRange(min=0),
        default=math.inf,
        metavar="SECONDS",
        help="After that no round is begun.",
    )
    anywhere = click.option(
        "--parent",
        type=PathType(exists=True, file_okay=False),
        default="/dev/shm",
        help="Directory for files.",
    )
    output = click.option(
        *("-o", "output"),
        type=click.Path(path_type=Path, dir_okay=False),
        help="A file for the results, as JSON.",
    )

    def make(function: Callable[..., None]) -> click.Command:
        def run(
            limit_s: float, parent: Path, output: Path | None, **values: Any
        ) -> None:
            front_end = values.pop("front_end", "fuse")
            only = values.pop("only", ())
            require(*needs, *([UBLK if front_end == "ublk" else FUSE] * front_ends))
            parameters = {x: values[x] for x in recorded if values[x] is not None}
            parameters |= {"kind": list(only)} if only else {}
            parameters |= {"front_end": front_end} if front_ends else {}
            count, seed = values.pop("rounds", 0), values.pop("seed", None)
            parameters |= {"rounds": count} if count else {}
            parameters |= {} if seed is None else {"seed": seed}
            with ExitStack() as stack:
                directory = parent
                if has_directory:
                    directory = stack.enter_context(tempdir(parent=parent))
                    stack.enter_context(apart(directory))
                document = make_document(
                    name.replace("-", "_"),
                    parameters=parameters,
                    directory=directory,
                    results=[],
                )
                document["script"] = f"tests/campaigns/{name.replace('-', '_')}.py"
                made = Run(
                    name,
                    directory,
                    stack,
                    document,
                    output,
                    tables,
                    count,
                    seed,
                    time.monotonic() + limit_s,
                    list(only or kinds),
                    front_end,
                )
                try:
                    function(made, **values)
                finally:
                    if "tables" in document:
                        show(document)
            _conclude(made)

        added = stacked(
            *mine, limit, anywhere if not on_disks else options.parent_option, output
        )
        settings: Any = {"help": function.__doc__, "context_settings": options.SETTINGS}
        result: click.Command = click.command(**settings)(added(run))
        return result

    return make
