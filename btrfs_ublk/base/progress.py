"""Show on stderr how far a long command is, and remove that at its end. If stderr is
not a terminal, and with --quiet, nothing is shown."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from btrfs_ublk.base.log import log
from btrfs_ublk.base.signals import deferred


class Task:
    """A piece of work, which is shown as a line on the terminal, if at all."""

    def __init__(self, update: Callable[..., object] | None = None) -> None:
        self._update = update
        self._total = 0

    def advance(self, amount: int = 1) -> None:
        """Add to what is done of ``total``."""
        if self._update is not None:
            self._update(advance=amount)

    def expect(self, amount: int) -> None:
        """Add to ``total``, when it is known only now."""
        self._total += amount
        if self._update is not None:
            self._update(total=self._total)

    def say(self, text: str) -> None:
        """Show what is being done, instead of the previous text."""
        if self._update is not None:
            self._update(description=text)


#: For callers that show nothing.
SILENT = Task()


@contextmanager
def progress(
    what: str, *, total: int | None = None, in_bytes: bool = False
) -> Iterator[Task]:
    """Show ``what`` while the work lasts, with the time, and with a bar if its
    ``total`` (a number of things) is known, or it is ``in_bytes``."""
    if not sys.stderr.isatty() or not log.isEnabledFor(logging.WARNING):
        yield Task()
        return
    # Importing this takes long, and scripts and services do not need it.
    with deferred():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )

    counted: list[ProgressColumn] = []
    if in_bytes or total is not None:
        counted = [BarColumn(), DownloadColumn() if in_bytes else MofNCompleteColumn()]
    console = Console(stderr=True, highlight=False)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *counted,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield Task(partial(bar.update, bar.add_task(what, total=total)))
