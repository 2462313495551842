"""``btrfs-ublk bench``"""

from __future__ import annotations

import click

from btrfs_ublk.base.entry import ModuleGroup


@click.command("bench", cls=ModuleGroup, package="btrfs_ublk.bench.commands")
def command() -> None:
    """Measure, and make reports of what was measured.

    Needs fio. What is in the results is in docs/benchmarks.md.
    """
