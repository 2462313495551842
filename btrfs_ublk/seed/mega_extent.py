"""Seeds of the mega-extent strategy, written from scratch by btrfs-ublk-mkseed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal
from uuid import UUID

from btrfs_ublk.base.helpers import MKSEED, helper_path
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError, CommandError, UsageError
from btrfs_ublk.physmap import ContiguousRun
from btrfs_ublk.seed.layout import DEFAULT_FILENAME, Seed, VirtualData

#: A seed of 4 EiB takes 0.1 s; on a slow disk, more.
_TIMEOUT_S = 120.0
_EXIT_FAILED = 1
_EXIT_USAGE = 2


def parse_report(text: str) -> Seed:
    """Parse what ``btrfs-ublk-mkseed --json`` prints. Raises BtrfsUblkError."""
    try:
        keys = json.loads(text)
        virtual = keys["virtual_data"]
        size, device_offset = virtual["size"], virtual["device_offset"]
        return Seed(
            path=Path(keys["path"]),
            fsid=UUID(keys["fsid"]),
            device_uuid=UUID(keys["device_uuid"]),
            label=keys["label"],
            device_bytes=keys["device_bytes"],
            file_bytes=keys["file_bytes"],
            metadata_bytes=keys["metadata_bytes"],
            local_bytes=keys["local_bytes"],
            virtual_data=VirtualData(
                filename=virtual["filename"],
                inode=virtual["inode"],
                size=size,
                runs=(ContiguousRun(0, device_offset, size),),
            ),
            chunks=keys["chunks"],
            chunk_bytes=keys["chunk_bytes"],
            stub_chunk=keys["stub_chunk"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BtrfsUblkError(
            f"{MKSEED} describes no seed ({error!r}): {text[:200]!r}",
            hint="build package and helpers from one version",
        ) from error


def make_seed(
    path: StrPath,
    *,
    virtual_data_size: int,
    virtual_data_filename: str = DEFAULT_FILENAME,
    label: str | None = None,
    fsid: UUID | None = None,
    device_uuid: UUID | None = None,
    time: int | None = None,
    chunk_bytes: int | None = None,
    metadata_profile: Literal["single", "dup"] = "single",
    inherit_nodatasum: bool = False,
    metadata_only: bool = False,
    force: bool = False,
) -> Seed:
    """Write a seed image; needs no privileges.

    ``virtual_data_size`` and ``chunk_bytes`` are in bytes, ``time`` in seconds since
    1970. With fsid and time given, the image is the same every time. With
    ``metadata_profile`` "dup", metadata are on the device twice; sprouts inherit it.
    With ``inherit_nodatasum``, new files on a sprout have no checksums, so that all
    take clones of virtual data; otherwise they need ``chattr +C``, as clone_file() does
    it. ``metadata_only`` makes the image only as large as a block server needs;
    otherwise, the (sparse) file has the device's full size and can be mounted over a
    loop device. ``force`` replaces an existing file. Raises UsageError for what the
    formatter refuses, CommandError when it fails; the path is unchanged then.
    """
    options = {
        "--virtual-data-size": virtual_data_size,
        "--virtual-data-filename": virtual_data_filename,
        "--label": label,
        "--fsid": fsid,
        "--device-uuid": device_uuid,
        "--time": time,
        "--chunk-size": chunk_bytes,
        "--metadata-profile": metadata_profile,
        "--inherit-nodatasum": "on" if inherit_nodatasum else "off",
    }
    argv: list[StrPath] = [helper_path(MKSEED)]
    argv += [
        f"{option}={value}" for option, value in options.items() if value is not None
    ]
    argv += ["--metadata-only"] if metadata_only else []
    argv += ["--force"] if force else []
    argv += ["--", path]
    done = run(argv, timeout_s=_TIMEOUT_S, ok_statuses=(0, _EXIT_FAILED, _EXIT_USAGE))
    if done.returncode != 0:
        # The helper's message suffices; it may end with a hint.
        message = done.stderr.strip().removeprefix(f"{MKSEED}: error: ")
        kind = UsageError if done.returncode == _EXIT_USAGE else CommandError
        raise kind(
            message
            or f"{MKSEED} exited with status {done.returncode}, and gave no reason"
        )
    return parse_report(done.stdout)
