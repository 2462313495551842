"""Options and files of results that campaigns share.

The parameters in a file of results have the names of the options that set them, so
that `btrfs-ublk bench report` can say how a file was made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Table

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
        output.write_text(json.dumps(document, indent=1) + "\n")
