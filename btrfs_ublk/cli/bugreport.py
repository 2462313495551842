"""``btrfs-ublk bugreport``"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from btrfs_ublk.base.entry import PathType, json_option
from btrfs_ublk.base.progress import progress
from btrfs_ublk.ops.bugreport import Entry, write_report
from btrfs_ublk.units import format_size


@click.command("bugreport")
@click.option(
    "-o",
    "--output",
    type=PathType(dir_okay=False),
    metavar="FILE",
    help="Where it goes.  [btrfs-ublk-bugreport-TIME.tar.gz]",
)
@json_option
def command(output: Path | None, as_json: bool) -> None:
    """Collect what a maintainer needs, without secrets.

    Versions, what `btrfs-ublk doctor` and `features` say, volumes, devices with their
    logs and statistics, what gc would look at, the kernel's messages on btrfs, ublk and
    loop. Prints what is in it, and sends it nowhere; only its owner may read
    it, and nothing is overwritten.

    Passwords, tokens, keys, users and queries in URLs are taken out. Names of hosts and
    files are not: look through it before you pass it on. As root, there is more in it.
    """
    path = output or Path(time.strftime("btrfs-ublk-bugreport-%Y%m%d-%H%M%S.tar.gz"))
    with progress("collecting"):
        entries = write_report(path)
    if as_json:
        listed = [asdict(entry) for entry in entries]
        click.echo(json.dumps({"path": str(path), "entries": listed}, indent=2))
        return
    for entry in entries:
        click.echo(f"{entry.name:36} {_about(entry)}")
    click.echo(f"\n{path}: {format_size(path.stat().st_size)}; look through it first:")
    click.echo(f"  tar -xOzf {path} | less")


def _about(entry: Entry) -> str:
    if entry.error is not None:
        return f"missing: {entry.error}"
    return format_size(entry.size_bytes)
