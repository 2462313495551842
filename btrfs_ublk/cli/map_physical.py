"""``btrfs-ublk map-physical``: where a btrfs file's bytes are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from btrfs_ublk.base.entry import PathType, json_lines_option
from btrfs_ublk.base.helpers import MAP_PHYSICAL, helper_path


@click.command("map-physical")
@json_lines_option
@click.argument("path", type=PathType())
def map_physical(path: Path, as_json: bool) -> None:
    """List where the bytes of a btrfs file are.

    PATH is the file. Prints tab-separated columns:

    FILE OFFSET, FILE SIZE: the bytes of the file that an extent holds. EXTENT OFFSET:
    where they begin in the (uncompressed) logical extent. EXTENT TYPE: regular,
    prealloc, inline or hole, and how it is encoded. LOGICAL SIZE, LOGICAL OFFSET: the
    logical extent behind it, as stored. PHYSICAL SIZE, DEVID, PHYSICAL OFFSET: where
    that is on which device. An extent in several pieces (RAID0, RAID10, RAID5, RAID6)
    or copies (DUP, RAID1, RAID10) has one row for each; parity is not listed.

    The file's dirty data is written first. Needs root.
    """
    helper = helper_path(MAP_PHYSICAL)
    sys.stdout.flush()
    # The helper replaces this process, so that its output and status are ours.
    os.execv(helper, [str(helper), *(["--json"] if as_json else []), "--", str(path)])


command = map_physical
