"""``btrfs-ublk features``"""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from btrfs_ublk.base.entry import json_option
from btrfs_ublk.server.features import FrontEndFeatures, kernel_features

_OFFERED = {True: "yes", False: "no", None: "?"}
_WIDTH = 100  # if the output is no terminal


@click.command("features")
@json_option
def command(as_json: bool) -> None:
    """List what this kernel offers to the front ends.

    And what the server uses of it, and why, or why not. A front end that is missing is
    no failure; `btrfs-ublk doctor` says how to get it.
    """
    front_ends, document = kernel_features()
    if as_json:
        click.echo(json.dumps(document))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    for front_end in front_ends:
        _print(console, front_end)


def _print(console: Console, about: FrontEndFeatures) -> None:
    title = about.front_end
    if about.protocol is not None:
        title += f", protocol {about.protocol}"
    if not about.available:
        title += f": not on this kernel\n  {about.reason}\n  {about.hint}"
    console.print(escape(title), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("feature", "Linux", "offered", "used", "why, or why not"):
        table.add_column(column, no_wrap=column != "why, or why not")
    for feature in about.features:
        table.add_row(
            *(feature.name, feature.since, _OFFERED[feature.offered]),
            *(_used(about, feature.offered, feature.used), escape(feature.reason)),
        )
    console.print(table)
    console.print()


def _used(about: FrontEndFeatures, offered: bool | None, used: str) -> str:
    if not about.available or offered is False or used == "never":
        return "no"
    return "yes" if used == "always" else "if asked"
