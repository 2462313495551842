"""``btrfs-ublk top``"""

from __future__ import annotations

import json
from itertools import islice

import click
from rich.console import Console
from rich.live import Live

from btrfs_ublk.base.entry import CountType, SecondsType, json_option
from btrfs_ublk.base.signals import Interrupted
from btrfs_ublk.ops.monitor.top import rows, table_of

_WIDTH = 140  # if the output is no terminal


@click.command("top")
@click.option(
    "--interval",
    "interval_s",
    type=SecondsType(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Time between two looks.",
)
@click.option(
    "--count",
    type=CountType(1),
    help="Look that often, then end.  [until Ctrl-C]",
)
@json_option
def command(interval_s: float, count: int | None, as_json: bool) -> None:
    """Show what devices do, live.

    Requests, latencies, what is fetched and cached. Where the output is no terminal,
    each look is a table of its own; with --json, an array on a line of its own.

    "errors" and "failures" (of requests to mirrors) are counted since the server
    started; "hosts off" are left alone for a while, since they failed again and again.
    A narrow terminal shows fewer columns.

    On a terminal, Ctrl-C leaves the table, and the exit status is 0 then. All other
    signals, and Ctrl-C elsewhere, are told by the exit status as usual.
    """
    console = Console()
    looks = islice(rows(interval_s=interval_s), count)
    if as_json:
        for found in looks:
            click.echo(json.dumps([row.to_dict() for row in found]))
        return
    if not console.is_terminal:
        console.width = _WIDTH
        for found in looks:
            console.print(table_of(found, console=console))
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            for found in looks:
                live.update(table_of(found, console=console), refresh=True)
    except Interrupted:
        raise  # TERM or HUP
    except KeyboardInterrupt:
        pass  # that ends it normally
