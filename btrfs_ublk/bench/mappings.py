"""What mappings cost: adding many to a map, loading them, and finding one.

A batch is one transaction, and durable once added. Half of the offsets looked up are
mapped.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import click

from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import MEASURE_MAP, helper_path
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Table, number
from btrfs_ublk.bench.stats import median_of
from btrfs_ublk.bench.study import TURNS, Column, Run, study, table

_TIMEOUT_S = 600.0


def tables(document: Document) -> list[Table]:
    """Make a table of medians and best values."""
    columns = [
        TURNS,
        Column("add, ms", "add_s", 1, 1e3, best=True),
        Column("load, ms", "load_s", 1, 1e3, best=True),
        Column("find, ns", "lookup_ns", 1, best=True),
        Column(
            "found/us of a thread", lambda turns: 1e3 / median_of(turns, "lookup_ns"), 2
        ),
        Column("load average", "load", 1),
    ]
    names = {
        "mappings": lambda x: number(x["mappings"]),
        "threads": lambda x: str(x["threads"]),
    }
    title = "Mappings: median (best)"
    return [table(title, document["results"], names, columns, left=0)]


@study(
    "mappings",
    click.option("--mappings", type=options.COUNT, default=100_000),
    click.option("--lookups", type=options.COUNT, default=2_000_000),
    repeats=11,
)
def command(run: Run, mappings: int, lookups: int) -> None:
    """Add mappings to a new map, load it, and look places up. Needs no privileges."""
    for _ in run.turns():
        for threads in (1, 2):
            run.wait_until_quiet()
            load = os.getloadavg()[0]
            with tempfile.TemporaryDirectory(dir=run.parent) as directory:
                path = Path(directory) / "it.map"
                counts = [str(count) for count in (mappings, lookups, threads)]
                argv: list[str | Path] = [helper_path(MEASURE_MAP), path, *counts]
                measured = json.loads(run_program(argv, timeout_s=_TIMEOUT_S).stdout)
                size_bytes = path.stat().st_size
            about = {"mappings": mappings, "lookups": lookups, "threads": threads}
            run.add({**about, "load": load, "file_bytes": size_bytes, **measured})


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.mappings")
