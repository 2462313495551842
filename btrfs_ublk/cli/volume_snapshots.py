"""The commands of ``btrfs-ublk volume`` that make snapshots, and roll back to them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import click

from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import json_option, print_rows
from btrfs_ublk.base.progress import progress
from btrfs_ublk.cli.volume_options import confirm, volume_name, volumes_base


@click.command()
@volume_name
@click.argument("snapshot")
@volumes_base
@json_option
def snapshot(name: str, snapshot: str, base: Path | None, as_json: bool) -> None:
    """Make a snapshot of a volume.

    NAME is a volume that is up, SNAPSHOT a name of yours. No data are moved, and who
    writes to the volume goes on. It is kept with the volume, out of sight of its users.
    Trees that were added are in it as well.
    """
    made = volumes.snapshot_volume(name, snapshot, base=base)
    if as_json:
        click.echo(json.dumps(vars(made)))


@click.command()
@volume_name
@volumes_base
@json_option
def snapshots(name: str, base: Path | None, as_json: bool) -> None:
    """List the snapshots of a volume.

    NAME is a volume that is up. TIME is when a snapshot was made; of what a rollback
    has kept, when that was last changed.
    """
    found = volumes.snapshots_of_volume(name, base=base)
    if as_json:
        click.echo(json.dumps([vars(each) for each in found], indent=2))
        return
    rows = [("SNAPSHOT", "TIME")]
    for each in found:
        when = datetime.fromtimestamp(each.time_s, UTC).isoformat()
        rows.append((each.name, when.replace("+00:00", "Z")))
    print_rows(rows)


@click.command("remove-snapshot")
@volume_name
@click.argument("snapshot")
@click.option("--yes", is_flag=True, help="Do not ask.")
@volumes_base
@json_option
def remove_snapshot(
    name: str, snapshot: str, yes: bool, base: Path | None, as_json: bool
) -> None:
    """Remove a snapshot of a volume.

    NAME is a volume that is up, which stays as it is. The kernel frees the space that
    only SNAPSHOT uses, a little later. Asks before, without --yes.
    """
    if not yes:
        confirm(f"Remove snapshot {snapshot} of {name}, with all that only it has?")
    volumes.remove_snapshot(name, snapshot, base=base)
    if as_json:
        keys = {"name": name, "snapshot": snapshot, "result": "removed"}
        click.echo(json.dumps(keys))


@click.command()
@volume_name
@click.argument("snapshot")
@volumes_base
@json_option
def rollback(name: str, snapshot: str, base: Path | None, as_json: bool) -> None:
    """Bring a volume back to a snapshot.

    NAME is a volume that is up, which goes down and comes up again for that: refused
    while somebody uses it, and it says who. What it had before is kept as another
    snapshot, whose name it says; SNAPSHOT stays as well.
    """
    with progress(f"roll volume {name} back"):
        kept = volumes.rollback_volume(name, snapshot, base=base)
    if as_json:
        click.echo(json.dumps({"name": name, "snapshot": snapshot, "kept": kept}))
    else:
        click.echo(f"what it had before is snapshot {kept}", err=True)
