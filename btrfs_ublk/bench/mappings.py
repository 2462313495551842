"""What mappings cost: adding many to a map, loading them, and finding one.

A batch is one transaction, and durable when it is added. Half of the places that are
looked up are mapped.

``python -m btrfs_ublk.bench.mappings --help``
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import wait_until_quiet
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.stats import grouped, median_of
from btrfs_ublk.entry import run_command
from btrfs_ublk.helpers import MEASURE_MAP, helper_path
from btrfs_ublk.process import run

DEFAULT_MAPPINGS = 100_000
DEFAULT_LOOKUPS = 2_000_000
_TIMEOUT_S = 600.0


def measure(mappings: int, lookups: int, threads: int, parent: Path) -> Result:
    """One new map, in a directory of its own under ``parent``."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mappings-", dir=parent) as directory:
        path = Path(directory) / "it.map"
        counts = [str(count) for count in (mappings, lookups, threads)]
        done = run([helper_path(MEASURE_MAP), path, *counts], timeout_s=_TIMEOUT_S)
        measured = json.loads(done.stdout)
        size_bytes = path.stat().st_size
    return {
        "mappings": mappings,
        "lookups": lookups,
        "threads": threads,
        "load": load,
        "file_bytes": size_bytes,
        **measured,
    }


def tables(document: Document) -> list[Table]:
    """Medians, and the best."""
    groups = grouped(
        document["results"], lambda result: (result["mappings"], result["threads"])
    )
    rows = []
    for (mappings, threads), results in groups.items():
        cells = [
            f"{number(median_of(results, name) * scale, 1)} "
            f"({number(min(result[name] for result in results) * scale, 1)})"
            for name, scale in (("add_s", 1e3), ("load_s", 1e3), ("lookup_ns", 1))
        ]
        per_us = 1e3 / median_of(results, "lookup_ns")
        rows.append(
            (
                number(mappings),
                str(threads),
                str(len(results)),
                *cells,
                number(per_us, 2),
                number(median_of(results, "load"), 1),
            )
        )
    columns = (
        "mappings",
        "threads",
        "turns",
        "add, ms",
        "load, ms",
        "find, ns",
        "found/us of a thread",
        "load average",
    )
    return [Table("Mappings: median (best)", columns, rows, 0)]


@click.command(context_settings=options.SETTINGS)
@click.option("--mappings", type=options.COUNT, default=DEFAULT_MAPPINGS)
@click.option("--lookups", type=options.COUNT, default=DEFAULT_LOOKUPS)
@options.common_options(repeats=11)
def command(
    mappings: int,
    lookups: int,
    repeats: int,
    parent: Path,
    patience_s: float,
    as_json: bool,
) -> None:
    """Add mappings to a new map, load it, and look places up. Needs no privileges."""
    document = make_document("mappings", parameters={}, directory=parent, results=[])
    for _turn in range(repeats):
        for threads in (1, 2):
            wait_until_quiet(timeout_s=patience_s)
            document["results"].append(measure(mappings, lookups, threads, parent))
    finish(document, as_json=as_json)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.mappings")
