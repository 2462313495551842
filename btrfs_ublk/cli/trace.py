"""``btrfs-ublk trace``"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

import click

from btrfs_ublk.base.entry import (
    CountType,
    PathType,
    SecondsType,
    print_found,
)
from btrfs_ublk.cli.map_options import device_argument, which_map
from btrfs_ublk.content import MapClient, TraceWriter
from btrfs_ublk.content.trace import Recording
from btrfs_ublk.device import device_map
from btrfs_ublk.errors import BtrfsUblkError, UsageError

#: The time between two polls; meanwhile, reads are kept in the server.
_POLL_S = 0.2


@click.group("trace")
def command() -> None:
    """Record what is read, and in which order.

    A DEVICE is named as by `btrfs-ublk device list`; it is about its lazy segments.
    """


@command.command()
@device_argument
@click.option(
    "-o",
    "--output",
    type=PathType(),
    required=True,
    help="The trace, which `btrfs-ublk prefetch --trace` replays.",
)
@click.option(
    "--for",
    "for_s",
    type=SecondsType(0, min_open=True),
    help="Record that long.  [until a signal]",
)
@click.option(
    "--until-idle",
    "idle_s",
    type=SecondsType(0, min_open=True),
    help="Record until nothing new was read for that long.",
)
@click.option(
    "--limit",
    type=CountType(1, 1 << 22),
    metavar="BLOCKS",
    help="Most blocks of 4 KiB that the server notes; 40 bytes each.  [524288]",
)
@which_map
def record(
    device: str,
    output: Path,
    for_s: float | None,
    idle_s: float | None,
    limit: int | None,
    path: str | None,
    as_json: bool,
) -> int:
    """Record first reads, for prefetching.

    Of each block of 4 KiB, the first read from now on, whether it is cached or not. A
    signal ends the recording, and the trace is whole all the same.

    For example: btrfs-ublk trace record NAME -o boot.trace --until-idle 10
    """
    client = device_map(device, path=path)
    number = client.trace_start(limit=limit)
    try:
        units, lost = _record_into(output, client, number, for_s, idle_s)
    except BtrfsUblkError:
        with suppress(BtrfsUblkError):  # it may have ended, or its server
            client.trace_read(number, 0, stop=True)
        raise
    found = {"units": units, "lost": lost}
    print_found(found, [f"{units} blocks were read"], as_json=as_json)
    if lost:
        click.echo(
            f"warning: {lost} reads came after the server's log was full (--limit)",
            err=True,
        )
    return 0


def _record_into(
    output: Path,
    client: MapClient,
    number: int,
    for_s: float | None,
    idle_s: float | None,
) -> tuple[int, int]:
    try:
        file = open(output, "w", encoding="utf-8", opener=_open_no_link)
    except OSError as error:
        link = "it is a symbolic link, which is not followed"
        why = link if error.errno == errno.ELOOP else error.strerror
        raise UsageError(f"{output}: {why}") from error
    try:
        with file:
            recording = Recording(client, number, TraceWriter(file))
            return _record(recording, for_s, idle_s)
    except OSError as error:
        raise BtrfsUblkError(
            f"{output}: {error.strerror}", hint="the trace is cut off there"
        ) from error


def _open_no_link(path: str, flags: int) -> int:
    # NB: a symbolic link in another user's directory could lead to any file.
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _record(
    recording: Recording, for_s: float | None, idle_s: float | None
) -> tuple[int, int]:
    click.echo("recording", err=True)
    started_s = last_s = time.monotonic()
    try:
        while True:
            now_s = time.monotonic()
            if recording.take():
                last_s = now_s
            if for_s is not None and now_s - started_s >= for_s:
                break
            if idle_s is not None and now_s - last_s >= idle_s:
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        pass  # that ends it normally
    return recording.finish()
