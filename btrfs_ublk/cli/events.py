"""``btrfs-ublk events``"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import islice

import click

from btrfs_ublk.base.entry import CountType, json_lines_option
from btrfs_ublk.ops.events import Event, follow_events


@click.command("events")
@click.option(
    "--count",
    type=CountType(1),
    help="End after so many.  [until Ctrl-C]",
)
@json_lines_option
def command(count: int | None, as_json: bool) -> None:
    """Print what becomes of devices, as it happens.

    One line each: first "present" for every device that there is, then "added",
    "removed", "health" when that changes, "recovered" when another server has taken
    over from a dead one, and "upgraded". Nothing has to run for it, and a line is
    printed within milliseconds; where nobody supervises a device, within a second.
    """
    for event in islice(follow_events(), count):
        click.echo(json.dumps(event.to_dict()) if as_json else _line(event))


def _line(event: Event) -> str:
    when = datetime.fromtimestamp(event.time_s, UTC).isoformat(timespec="milliseconds")
    line = f"{when.replace('+00:00', 'Z')}  {event.device}  {event.event}"
    if event.health is not None:
        line += f"  {event.health}"
    return line + (f": {event.reason}" if event.reason else "")
