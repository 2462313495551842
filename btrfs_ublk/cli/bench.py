"""``btrfs-ublk bench``"""

from __future__ import annotations

import click

from btrfs_ublk.bench import commands
from btrfs_ublk.entry import ModuleGroup


@click.command("bench", cls=ModuleGroup, package=commands)
def command() -> None:
    """Measure: one run, a matrix of runs, what comes of it. Needs fio."""
