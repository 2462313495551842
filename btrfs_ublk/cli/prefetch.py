"""``btrfs-ublk prefetch``"""

from __future__ import annotations

from pathlib import Path

import click

from btrfs_ublk.base.entry import (
    CountType,
    PathType,
    SizeType,
    print_found,
)
from btrfs_ublk.base.progress import progress
from btrfs_ublk.cli.map_options import device_argument, no_room_text, which_map
from btrfs_ublk.content import MapClient, Prefetch, Trace, TraceSource
from btrfs_ublk.device import device_map
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import format_size


@click.command("prefetch")
@device_argument
@click.option(
    "--trace",
    type=PathType(exists=True, dir_okay=False),
    help="What `btrfs-ublk trace record` has recorded, in that order.",
)
@click.option("--all", "everything", is_flag=True, help="Prefetch all that is mapped.")
@click.option(
    "--offset", type=SizeType(), help="Prefetch what is mapped from there on."
)
@click.option("--length", type=SizeType(), help="Prefetch no more than that.")
@click.option(
    "--rate", type=SizeType(), help="Bytes that it may fetch per second.  [no limit]"
)
@click.option(
    "--concurrency",
    type=CountType(1, 64),
    help="Units that it may fetch at a time.  [32]",
)
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait until it is over (a signal cancels it), or only begin it.  [wait]",
)
@click.option("--status", is_flag=True, help="Instead, say how far the last one is.")
@click.option("--cancel", is_flag=True, help="Instead, end the one that runs.")
@which_map
def command(
    device: str,
    trace: Path | None,
    everything: bool,
    offset: int | None,
    length: int | None,
    rate: int | None,
    concurrency: int | None,
    wait: bool,
    status: bool,
    cancel: bool,
    path: str | None,
    as_json: bool,
) -> int:
    """Fetch into the cache before it is read.

    A DEVICE is named as by `btrfs-ublk device list`. Readers come first; what is cached
    is skipped, and what fails is counted and left out, so it may be repeated. Exit
    status 1: something is not in the cache.

    For example: btrfs-ublk prefetch NAME --trace boot.trace --rate 20M
    """
    ranged = offset is not None or length is not None
    tasks = sum((trace is not None, everything, ranged, status, cancel))
    if tasks != 1:
        raise UsageError(
            "options exclude each other" if tasks else "nothing to prefetch is named",
            hint="one of --trace, --all and --offset/--length; or --status, --cancel",
        )
    if (status or cancel) and (rate is not None or concurrency is not None or not wait):
        raise UsageError(
            "--rate, --concurrency and --no-wait are for a prefetch that begins",
            hint="leave them out with --status and --cancel",
        )
    client = device_map(device, path=path)
    if status or cancel:
        found = client.prefetch_cancel() if cancel else client.prefetch_status()
        _print(found, as_json)
        return 0
    start = offset or 0
    extents, missing = (None, 0) if trace is None else _extents(trace, client)
    begun = client.prefetch(
        extents,
        start=start,
        end=None if length is None else start + length,
        bytes_per_s=rate or 0,
        at_once=concurrency,
        follow=wait,
    )
    if not wait:
        _print(begun, as_json)
        return 0
    ended = _follow(client, begun)
    _print(ended, as_json)
    if ended.failed_units:
        click.echo(
            f"warning: {ended.failed_units} units could not be fetched: the log says"
            f" why, which btrfs-ublk device status {device} names; then try again",
            err=True,
        )
    return 0 if ended.is_complete and not missing else 1


def _extents(path: Path, client: MapClient) -> tuple[list[tuple[int, int, int]], int]:
    """Return a trace's extents, and how many of its units the map does not have."""
    trace = Trace.load(path)
    known = [
        (int(one["id"]), TraceSource.describe(one["description"]))
        for one in client.sources()
        if one["digests"] != "computed"
    ]
    extents, missing = trace.extents(known)
    for number, units in missing.items():
        click.echo(
            f"warning: {units} units are left out, as their source is not mapped:"
            f" {trace.sources[number]}",
            err=True,
        )
    if trace.lost is None:
        click.echo(
            f"warning: the trace {path} is incomplete: its end is missing", err=True
        )
    if missing and not extents:
        raise BtrfsUblkError(
            f"the device has none of the sources of {path}",
            hint="`btrfs-ublk map add` them first",
        )
    return extents, sum(missing.values())


def _follow(client: MapClient, begun: Prefetch) -> Prefetch:
    """Follow a prefetch to its end. What interrupts us also ends it."""
    now: Prefetch | None = begun
    done = 0
    try:
        with progress("prefetching", total=begun.units) as task:
            while now is not None and now.id == begun.id and now.is_running:
                task.advance(now.done_units - done)
                done = now.done_units
                now = client.prefetch_status(follow=begun.id)
    except KeyboardInterrupt:
        client.prefetch_cancel()
        raise
    if now is None or now.id != begun.id:
        raise BtrfsUblkError("the prefetch has ended, because its server was restarted")
    return now


def _print(found: Prefetch | None, as_json: bool) -> None:
    lines = ["no prefetch since the server started"]
    if found is not None:
        why = f" ({found.why})" if found.why else ""
        lines = [
            f"{found.state}{why}: {found.percent:.1f} % of {found.units} units;"
            f" {found.cached_units} were cached, {found.fetched_units} fetched"
            f" ({format_size(found.fetched_bytes)} in {found.seconds:.1f} s),"
            f" {found.failed_units} failed,"
            f" for {found.uncached_units} there was no room"
        ]
        lines += [no_room_text(found.holds_bytes)] * bool(found.uncached_units)
    print_found(None if found is None else vars(found), lines, as_json=as_json)
