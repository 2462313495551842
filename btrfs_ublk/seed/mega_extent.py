"""Seeds of the mega-extent strategy, written from scratch by btrfs-ublk-mkseed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.helpers import MKSEED, helper_path
from btrfs_ublk.process import run
from btrfs_ublk.server.description import (
    Description,
    FileSegment,
    Segment,
    ZeroSegment,
    fill,
)

DEFAULT_FILENAME = ".btrfs-ublk-virtual-data"

#: It takes a tenth of a second for 4 EiB; a slow disk below makes it longer.
_TIMEOUT_S = 120.0
_EXIT_USAGE = 2


@dataclass(frozen=True)
class VirtualData:
    """The one file of a seed: its data are [device_offset, device_offset + size)."""

    filename: str
    inode: int
    size: int
    device_offset: int


@dataclass(frozen=True)
class Seed:
    """A seed image; all sizes and offsets are bytes.

    ``local_bytes`` is where what must be stored ends: the image's metadata and copies
    of the superblock. ``file_bytes`` is the image's size, equal to that for one made
    with ``metadata_only``, else to ``device_bytes``.
    """

    path: Path
    fsid: UUID
    device_uuid: UUID
    label: str
    device_bytes: int
    file_bytes: int
    metadata_bytes: int
    local_bytes: int
    virtual_data: VirtualData
    chunks: int
    chunk_bytes: int
    stub_chunk: bool

    @classmethod
    def from_json(cls, text: str) -> Seed:
        """What ``btrfs-ublk-mkseed --json`` prints. Raises BtrfsUblkError."""
        try:
            keys = json.loads(text)
            virtual = keys["virtual_data"]
            return cls(
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
                    size=virtual["size"],
                    device_offset=virtual["device_offset"],
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

    def description(self, virtual_segments: Iterable[Segment]) -> Description:
        """The address space of a device for this seed.

        ``virtual_segments`` have offsets within the virtual file; what they leave free
        of it cannot be read (EIO). All else but the metadata reads as zeroes:
        superblock copies and signatures of other formats are looked for there
        (blkid(8)).
        """
        virtual = self.virtual_data
        contents = fill(0, virtual.size, virtual_segments, gaps="error")
        metadata = FileSegment(
            offset=0, length=self.local_bytes, path=str(self.path.absolute())
        )
        segments: list[Segment] = [metadata]
        if virtual.device_offset > self.local_bytes:
            gap_bytes = virtual.device_offset - self.local_bytes
            segments.append(ZeroSegment(offset=self.local_bytes, length=gap_bytes))
        segments += [segment.moved(virtual.device_offset) for segment in contents]
        end = virtual.device_offset + virtual.size
        if end < self.device_bytes:
            segments.append(ZeroSegment(offset=end, length=self.device_bytes - end))
        return Description(self.device_bytes, segments)


def make_seed(
    path: Path,
    *,
    virtual_data_size: int,
    virtual_data_filename: str = DEFAULT_FILENAME,
    label: str | None = None,
    fsid: UUID | None = None,
    device_uuid: UUID | None = None,
    time: int | None = None,
    chunk_bytes: int | None = None,
    metadata_only: bool = False,
    force: bool = False,
) -> Seed:
    """Write a seed image; needs no privileges.

    ``virtual_data_size`` and ``chunk_bytes`` are in bytes, ``time`` in seconds since
    1970. With fsid and time given, the image is the same every time.
    ``metadata_only`` leaves the image as small as a block server needs; without it, the
    (sparse) file has the device's full size and can be mounted over a loop device.
    ``force`` replaces an existing file. Raises UsageError for what the formatter
    refuses, CommandError when it fails; the path is as before then.
    """
    options = {
        "--virtual-data-size": virtual_data_size,
        "--virtual-data-filename": virtual_data_filename,
        "--label": label,
        "--fsid": fsid,
        "--device-uuid": device_uuid,
        "--time": time,
        "--chunk-size": chunk_bytes,
    }
    argv: list[str | Path] = [helper_path(MKSEED), "--json"]
    argv += [
        f"{option}={value}" for option, value in options.items() if value is not None
    ]
    argv += ["--metadata-only"] if metadata_only else []
    argv += ["--force"] if force else []
    done = run([*argv, "--", path], timeout_s=_TIMEOUT_S, ok_statuses=(0, _EXIT_USAGE))
    if done.returncode == _EXIT_USAGE:
        raise UsageError(done.stderr.strip().removeprefix(f"{MKSEED}: error: "))
    return Seed.from_json(done.stdout)
