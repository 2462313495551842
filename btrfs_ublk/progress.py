"""How far a long command is, for people: on stderr, where that is a terminal, and gone
when it ends. Elsewhere, and with --quiet, nothing is said.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from btrfs_ublk.log import log


class Task:
    """One piece of work, as a line on the terminal, or as nothing."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def advance(self, amount: int = 1) -> None:
        """So much more is done, of ``total``."""
        self._bar.advance(self._task, amount)

    def say(self, text: str) -> None:
        """What is being done; in the place of what was said before."""
        self._bar.update(self._task, description=text)


@contextmanager
def progress(
    what: str, *, total: int | None = None, in_bytes: bool = False
) -> Iterator[Task]:
    """Show ``what`` for as long as the work takes: with a bar where its ``total`` is
    known (bytes, or a number of things), else with the time.
    """
    console = Console(stderr=True, highlight=False)
    counted: list[ProgressColumn] = []
    if total is not None:
        counted = [BarColumn(), DownloadColumn() if in_bytes else MofNCompleteColumn()]
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *counted,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal or not log.isEnabledFor(logging.WARNING),
    )
    with bar:
        yield Task(bar, bar.add_task(what, total=total))
