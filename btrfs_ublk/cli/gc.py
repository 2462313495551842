"""``btrfs-ublk gc``"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import click

from btrfs_ublk.base.entry import json_option, print_found
from btrfs_ublk.base.gc import Report, collect
from btrfs_ublk.base.private_dirs import VOLUMES_DIRECTORY, VOLUMES_VARIABLE
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.state import half_made
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError


@click.command("gc")
@click.option(
    "--dry-run",
    is_flag=True,
    help="List what killed runs made, which may have gone since; remove nothing.",
)
@json_option
def command(dry_run: bool, as_json: bool) -> int:
    """Remove what killed runs left behind.

    These are mounts, loop and ublk devices, temporary files and directories. Only those
    are removed that this program made, according to the ledgers of processes that have
    ended; and volumes that a killed command left half made, or half removed. Devices
    and volumes that are to stay are not touched; `btrfs-ublk device gc` removes dead
    devices, and those that a killed command left half made.

    Exit status 1: something is left.
    """
    report = collect(dry_run=dry_run)
    halves: dict[str, str] = {}
    failure = None
    try:
        for path in _remove_halves(dry_run=dry_run):
            left = "left" if path.exists() else "removed"
            halves[str(path)] = "would-remove" if dry_run else left
    except BtrfsUblkError as error:
        failure = error  # what has been removed is told nonetheless
    volumes = [{"path": path, "result": x} for path, x in halves.items()]
    found = report.to_dict() | {"volumes": volumes}
    print_found(found, _lines(report, halves), as_json=as_json)
    if failure is not None:
        raise failure
    return 0 if report.is_clean and "left" not in halves.values() else 1


def _remove_halves(*, dry_run: bool) -> list[Path]:
    place = os.environ.get(VOLUMES_VARIABLE) or VOLUMES_DIRECTORY
    if not any(half_made(Path(place))):
        return []
    with deferred():
        # Nearly always, there are none.
        from btrfs_ublk.volume.store import remove_halves, volumes_directory
    with suppress(CapabilityError):  # root's, and this is another user
        return remove_halves(volumes_directory(), dry_run=dry_run)
    return []


def _lines(report: Report, halves: Mapping[str, str]) -> Iterator[str]:
    for ledger in report.ledgers:
        for outcome in ledger.outcomes:
            reason = f": {outcome.reason}" if outcome.reason else ""
            result = outcome.result.replace("-", " ")
            yield f"{result:12} {outcome.entry}{reason}"
        if ledger.damaged_lines:
            yield f"damaged      {ledger.damaged_lines} lines of {ledger.path}"
    for path, result in halves.items():
        yield f"{result.replace('-', ' '):12} volume path={path}"
    if not halves and not any(ledger.outcomes for ledger in report.ledgers):
        yield "nothing to remove"
