"""``btrfs-ublk bench run``: one benchmark run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.base.progress import progress
from btrfs_ublk.bench import options
from btrfs_ublk.bench.config import KEYS, Configuration
from btrfs_ublk.bench.environment import environment
from btrfs_ublk.bench.run import OK, SKIPPED, run_configuration
from btrfs_ublk.errors import CapabilityError

#: Values for keys that are not given.
DEFAULTS = {
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


def _wrapped(example: Mapping[str, Any]) -> str:
    """Format a command to copy, in lines that click's help does not rewrap."""
    *most, last = (json.dumps({k: v})[1:-1] for k, v in example.items())
    pairs = "".join(f"    {pair},\n" for pair in most) + f"    {last}\n"
    return f"  btrfs-ublk bench run --json-opts '{{\n{pairs}  }}'"


@click.command(
    "run",
    context_settings=options.SETTINGS,
    epilog="\b\nThe same as without --json-opts:\n" + _wrapped(DEFAULTS),
)
@click.option(
    "--json-opts",
    default="{}",
    show_default=False,
    metavar="JSON",
    help=f"The configuration: an object with any of the keys {', '.join(KEYS)}.",
)
@options.parent_option
def command(json_opts: str, parent: Path) -> int:
    """Do one run, and print what was measured.

    Makes a seed, serves its blocks, sprouts it, clones a file from it, reads that at
    random with fio, checks its bytes before and after; and takes all down again.

    Prints one JSON line: the configuration, total_iops and job_iops, and what else was
    measured. Where something is wrong, "status" and "reason" in it say what, and the
    exit status is 1; 3 where this machine cannot do it ("skipped").
    """
    configuration = Configuration.from_json(json_opts, defaults=DEFAULTS)
    with progress("running"):
        row = run_configuration(
            configuration, parent=parent, environment=environment(parent)
        )
    click.echo(json.dumps(row))
    status = row["status"]
    if status == OK:
        return 0
    click.echo(f"{status}: {row['reason']}", err=True)
    return CapabilityError.exit_status if status == SKIPPED else 1
