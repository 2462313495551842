"""Options and files of results that campaigns share.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.base.entry import PathType
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE, VOLUMES_VARIABLE
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Table, make_document, show, to_text
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.store import IMAGES_VARIABLE

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


def store(document: Document, tables: Sequence[Table], output: Path | None) -> None:
    """Put the tables into the document, as no module of the package makes them, and
    write the file. Call this after each round, as the next one may be the last.
    """
    document["tables"] = [asdict(table) for table in tables]
    if output is not None:
        output.write_text(to_text(document) + "\n")


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
    return [each for result in document["results"] for each in result["problems"]]


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
        store(self.document, self._tables(self.document), self._output)

    @property
    def faults(self) -> list[str]:
        return self._faults(self.document)

    def add(self, result: dict[str, Any], *, rounds: int = 1) -> None:
        """Add a result, which took so many rounds."""
        self.rounds += rounds
        self.document["results"].append(result)
        self._store()

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
