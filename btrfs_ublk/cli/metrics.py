"""``btrfs-ublk metrics``"""

from __future__ import annotations

import json

import click

from btrfs_ublk.base.entry import json_option
from btrfs_ublk.errors import UsageError
from btrfs_ublk.ops.monitor.exporter import Address, serve_metrics
from btrfs_ublk.ops.monitor.metrics import metrics_dict, metrics_text


@click.command("metrics")
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    help="Serve them over HTTP instead, until a signal comes.",
)
@json_option
def command(listen: str | None, as_json: bool) -> None:
    """Print statistics in Prometheus' text format.

    They are of all devices. With --listen, answer scrapers on an address, such as
    127.0.0.1:9469. Nothing in them is secret but paths, names of hosts, and how much is
    read; there is no password.
    """
    if as_json and listen is not None:
        raise UsageError("--json and --listen exclude each other")
    if as_json:
        click.echo(json.dumps(metrics_dict(), indent=2))
    elif listen is None:
        click.echo(metrics_text(), nl=False)
    else:
        serve_metrics(Address.parse(listen))
