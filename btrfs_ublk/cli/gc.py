"""``btrfs-ublk gc``"""

from __future__ import annotations

import json

import click

from btrfs_ublk.base.entry import json_option
from btrfs_ublk.base.gc import Report, collect


@click.command("gc")
@click.option(
    "--dry-run",
    is_flag=True,
    help="List what killed runs made, which may have gone since; remove nothing.",
)
@json_option
def command(dry_run: bool, as_json: bool) -> int:
    """Remove what killed runs left behind.

    These are mounts, loop and ublk devices, and temporary directories. Only those are
    removed that this program made, according to the ledgers of processes that have
    ended. Devices and volumes that are to stay are not touched; `btrfs-ublk device gc`
    removes dead devices, and those that a killed command left half made.

    Exit status 1: something is left.
    """
    report = collect(dry_run=dry_run)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    return 0 if report.is_clean else 1


def _print(report: Report) -> None:
    for ledger in report.ledgers:
        for outcome in ledger.outcomes:
            reason = f": {outcome.reason}" if outcome.reason else ""
            result = outcome.result.replace("-", " ")
            click.echo(f"{result:12} {outcome.entry}{reason}")
        if ledger.damaged_lines:
            click.echo(f"damaged      {ledger.damaged_lines} lines of {ledger.path}")
    if not any(ledger.outcomes for ledger in report.ledgers):
        click.echo("nothing to remove")
