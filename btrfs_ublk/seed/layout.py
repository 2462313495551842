"""The layout of a seed of any strategy: where its virtual data are, and what must be
stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from btrfs_ublk.base.records import dataclass
from btrfs_ublk.physmap import ContiguousRun, MappingError, PhysicalMap
from btrfs_ublk.server.description import Description, FileSegment, Segment, fill

DEFAULT_FILENAME = ".btrfs-ublk-virtual-data"
#: The subvolume that a plain mount of a seed shows (SEED_SUBVOLUME_NAME in seed.h).
SUBVOLUME_NAME = "files"

#: Zeroes behind the seed, on the device only. Programs that identify devices (udev,
#: blkid, wipefs, lsblk, the kernel for partitions) read the end of a device: RAID and
#: ZFS signatures are up to 1.5 MiB before it, and each read causes some read-ahead.
#: Nothing else is mapped there, so without these zeroes such reads would fail.
END_BYTES = 16 << 20

Range = tuple[int, int]


@dataclass(frozen=True)
class VirtualData:
    """The one file of a seed, in its top-level subvolume. ``runs`` say where its bytes
    are on the device. They are in the order of the file, cover all of it, and their
    device offsets rise, too.
    """

    filename: str
    inode: int
    size: int
    runs: tuple[ContiguousRun, ...]

    def __post_init__(self) -> None:
        position = device_position = 0
        for run in self.runs:
            if run.file_offset != position or run.physical_offset < device_position:
                raise ValueError(f"{run} does not follow the run before it")
            position += run.size_bytes
            device_position = run.physical_offset + run.size_bytes
        if position != self.size:
            raise ValueError(f"the runs have {position} bytes, the file {self.size}")

    @property
    def device_offset(self) -> int:
        """The device offset of the file's first byte."""
        return self.runs[0].physical_offset

    @property
    def largest_run(self) -> ContiguousRun:
        """The longest run, to clone from without a seam; the first of equals."""
        return max(self.runs, key=lambda run: run.size_bytes)

    def assert_matches(self, mapping: PhysicalMap) -> None:
        """Raise MappingError unless the kernel's map equals the runs."""
        mapping.assert_virtual_data(
            size_bytes=self.size,
            device_offset=self.largest_run.physical_offset,
            whole=len(self.runs) == 1,
        )
        found = mapping.contiguous_runs()
        for run, expected in zip(found, self.runs):
            if run != expected:
                raise MappingError("virtual data", f"{run}, expected was {expected}")
        if len(found) != len(self.runs):
            raise MappingError(
                "virtual data", f"{len(found)} runs, expected were {len(self.runs)}"
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "filename": self.filename,
            "inode": self.inode,
            "size": self.size,
            "device_offset": self.device_offset,
            "runs": [run._asdict() for run in self.runs],
        }


@dataclass(frozen=True)
class Seed:
    """A seed image; all sizes and offsets are bytes.

    ``local_bytes`` is the end of what must be stored: metadata and superblock copies.
    ``file_bytes`` is the image's size: ``local_bytes`` if it was made with
    ``metadata_only``, else ``device_bytes``. ``chunks`` counts the chunks of virtual
    data, ``chunk_bytes`` is the length of the longest.
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
    stub_chunk: bool = False
    strategy: str = "mega-extent"

    def to_dict(self) -> dict[str, Any]:
        """What fits in JSON."""
        return vars(self) | {
            "path": str(self.path),
            "fsid": str(self.fsid),
            "device_uuid": str(self.device_uuid),
            "virtual_data": self.virtual_data.to_dict(),
        }

    def other_ranges(self) -> Iterator[Range]:
        """Yield the (offset, length) of all of the device that is not virtual data."""
        position = 0
        for run in self.virtual_data.runs:
            if run.physical_offset > position:
                yield position, run.physical_offset - position
            position = run.physical_offset + run.size_bytes
        if position < self.device_bytes:
            yield position, self.device_bytes - position

    def local_ranges(self) -> Iterator[Range]:
        """Yield those of other_ranges() that the image stores."""
        for offset, length in self.other_ranges():
            if offset < self.local_bytes:
                yield offset, min(length, self.local_bytes - offset)

    def description(self, virtual_segments: Iterable[Segment]) -> Description:
        """Describe the address space of a device for this seed.

        ``virtual_segments`` have offsets within the virtual file; ranges without one
        cannot be read (EIO). All else but the metadata reads as zeroes: programs look
        there for superblock copies and signatures of other formats (blkid(8)). The
        device is END_BYTES longer than the seed.
        """
        virtual = self.virtual_data
        contents = fill(0, virtual.size, virtual_segments, gaps="error")
        path = str(self.path.absolute())
        segments: list[Segment] = [
            FileSegment(offset=offset, length=length, path=path, file_offset=offset)
            for offset, length in self.local_ranges()
        ]
        first = 0
        for run in virtual.runs:
            run_end = run.file_offset + run.size_bytes
            while contents[first].end <= run.file_offset:
                first += 1
            for segment in contents[first:]:
                if segment.offset >= run_end:
                    break
                part = segment.part(run.file_offset, run_end)
                segments.append(part.moved(run.physical_offset - run.file_offset))
        size = self.device_bytes + END_BYTES
        return Description(size, fill(0, size, segments, gaps="zero"))
