"""``btrfs-ublk metrics``"""

from __future__ import annotations

import click

from btrfs_ublk.ops.monitor.exporter import Address, serve_metrics
from btrfs_ublk.ops.monitor.metrics import metrics_text


@click.command("metrics")
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    help="Serve them over HTTP instead, until a signal comes.",
)
def command(listen: str | None) -> None:
    """Print statistics in Prometheus' text format.

    They are of all devices. With --listen, answer scrapers on an address, such as
    127.0.0.1:9469. Nothing in them is secret but paths, names of hosts, and how much is
    read; there is no password.
    """
    if listen is None:
        click.echo(metrics_text(), nl=False)
    else:
        serve_metrics(Address.parse(listen))
