"""The layout of a seed, or of any btrfs of one device."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from btrfs_ublk.base.helpers import CHECKSEED, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError

#: A seed of 4 EiB takes 0.1 s; a large file system on a slow disk takes longer.
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ChunkSum:
    """The chunks of one type and profile; lengths are in bytes of logical addresses.

    ``type``: DATA, METADATA, SYSTEM or DATA+METADATA. ``profile``: SINGLE, DUP or RAID0
    (of one stripe).
    """

    type: str
    profile: str
    count: int
    total_bytes: int
    shortest_bytes: int
    longest_bytes: int


@dataclass(frozen=True)
class VirtualFile:
    """The file of virtual data in the image.

    ``device_offset`` is where its first extent begins, None when it has none.
    ``preallocated_extents`` read as zeroes, whatever the device contains. ``flags`` are
    the inode's: NODATASUM, IMMUTABLE...
    """

    filename: str
    inode: int
    size: int
    extents: int
    preallocated_extents: int
    device_offset: int | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class SeedLayout:
    """A btrfs in an image or on a device; all sizes are bytes.

    ``strategy`` is the detected one: "mega-extent", "fallocate" or "other".
    ``device_bytes`` is the device's size in the superblock, ``file_bytes`` the image's
    own. Flags of the superblock are names without their prefix, unknown ones
    hexadecimal numbers. ``default_subvolume`` is the number of the one that a plain
    mount shows; ``new_files_nodatasum``: whether its new files inherit NODATASUM.
    """

    path: Path
    fsid: UUID
    device_uuid: UUID
    label: str
    generation: int
    device_bytes: int
    file_bytes: int
    used_bytes: int
    node_bytes: int
    checksum: str
    flags: tuple[str, ...]
    incompat_flags: tuple[str, ...]
    compat_ro_flags: tuple[str, ...]
    seeding: bool
    strategy: str
    subvolumes: int
    default_subvolume: int
    chunks: tuple[ChunkSum, ...]
    new_files_nodatasum: bool
    virtual_data: VirtualFile | None

    @classmethod
    def from_json(cls, text: str) -> SeedLayout:
        """Parse ``btrfs-ublk-checkseed inspect``. Raises BtrfsUblkError."""
        try:
            keys = json.loads(text)
            virtual = keys["virtual_data"]
            if virtual is not None:
                flags = tuple(virtual["flags"])
                keys["virtual_data"] = VirtualFile(**virtual | {"flags": flags})
            for key in ("flags", "incompat_flags", "compat_ro_flags"):
                keys[key] = tuple(keys[key])
            for key in ("fsid", "device_uuid"):
                keys[key] = UUID(keys[key])
            keys["chunks"] = tuple(ChunkSum(**chunk) for chunk in keys["chunks"])
            keys["path"] = Path(keys["path"])
            return cls(**keys)
        except (ValueError, KeyError, TypeError) as error:
            raise BtrfsUblkError(
                f"{CHECKSEED} describes no layout ({error!r}): {text[:200]!r}",
                hint="build package and helpers from one version",
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """What fits in JSON."""
        return dataclasses.asdict(self) | {
            "path": str(self.path),
            "fsid": str(self.fsid),
            "device_uuid": str(self.device_uuid),
        }


def inspect_seed(path: Path) -> SeedLayout:
    """Read the layout of an image or an unmounted block device; writes nothing.

    Raises BtrfsUblkError, which names the structure, when the path is mounted, is not a
    btrfs of one device, or has damaged trees.
    """
    argv: list[str | Path] = [helper_path(CHECKSEED), "inspect", path]
    done = run(argv, timeout_s=TIMEOUT_S, ok_statuses=(0, 1))
    if done.returncode:
        raise helper_error(done.stderr)
    return SeedLayout.from_json(done.stdout)


def helper_error(stderr: str) -> BtrfsUblkError:
    """Convert the helper's message and hint to an error."""
    message, _, hint = stderr.strip().partition("\n  hint: ")
    return BtrfsUblkError(
        message.removeprefix(f"{CHECKSEED}: error: "), hint=hint or None
    )
