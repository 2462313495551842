"""``btrfs-ublk bench run``: one benchmark run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.config import KEYS, Configuration
from btrfs_ublk.bench.environment import environment
from btrfs_ublk.bench.run import OK, run_configuration

EXAMPLE = {
    "btrfs.seed": "mega-extent",
    "btrfs.virtual_data_size": "4E",
    "btrfs.total_clone_size": "2G",
    "fio.depth": 16,
    "fio.direct": 1,
    "fio.engine": "io_uring",
    "fio.jobs": 2,
    "fio.runtime": 10,
    "ublk.num_queues": 2,
}


@click.command("run", context_settings=options.SETTINGS)
@click.option(
    "--json-opts",
    required=True,
    metavar="JSON",
    help=f"The configuration: an object with the keys {', '.join(KEYS)}. All but the "
    f"last two have to be there. For example {json.dumps(EXAMPLE)}",
)
@options.parent_option
def command(json_opts: str, parent: Path) -> int:
    """Make a seed, serve its blocks, sprout it, clone a file from it, read that at
    random with fio, check its bytes before and after; and take all down again.

    Prints one JSON line: the configuration, total_iops and job_iops, and what else was
    measured. Where something is wrong, "status" and "reason" in it say what, and the
    exit status is 1.
    """
    configuration = Configuration.from_json(json_opts)
    row = run_configuration(
        configuration, parent=parent, environment=environment(parent)
    )
    click.echo(json.dumps(row))
    if row["status"] != OK:
        click.echo(f"{row['status']}: {row['reason']}", err=True)
    return 0 if row["status"] == OK else 1
