"""The layout of a seed, or of any btrfs of one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from btrfs_ublk.base.helpers import SEED, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError

#: A seed of 4 EiB takes 0.1 s; a large file system on a slow disk takes longer.
TIMEOUT_S = 600.0


def inspect_seed(path: Path) -> dict[str, Any]:
    """Read the layout of an image or a block device; writes nothing.

    All sizes are bytes. "strategy" is the detected one: "mega-extent", "fallocate" or
    "other"; "device_bytes" is the device's size in the superblock, "file_bytes" the
    image's own, "local_bytes" the end of what must be stored. Flags are names without
    their prefix, unknown ones hexadecimal numbers. "default_subvolume" is the number of
    the one that a plain mount shows, "new_files_nodatasum": whether its new files
    inherit NODATASUM. Of "virtual_data", which may be None, "device_offset" is where
    its first extent begins, or None, and "preallocated_extents" read as zeroes,
    whatever the device contains.

    Raises BtrfsUblkError, which names the structure, when the path is not a btrfs of
    one device, or has damaged trees, as it may seem to have while it is written to.
    """
    argv: list[str | Path] = [helper_path(SEED), "inspect", path]
    done = run(argv, timeout_s=TIMEOUT_S, ok_statuses=(0, 1))
    if done.returncode:
        raise BtrfsUblkError(done.stderr.strip().removeprefix(f"{SEED}: error: "))
    found: dict[str, Any] = json.loads(done.stdout)
    return found
