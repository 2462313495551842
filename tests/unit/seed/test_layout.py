"""Seeds as layouts: where virtual data and what is stored are on the device."""

import uuid
from pathlib import Path

import pytest

from btrfs_ublk.physmap import ContiguousRun, MappingError, MapRow, PhysicalMap
from btrfs_ublk.seed import Seed, VirtualData
from btrfs_ublk.seed.layout import END_BYTES
from btrfs_ublk.server import FileSegment, MemsetSegment, PatternSegment
from btrfs_ublk.units import GIB, MIB

#: Three runs with gaps of 1, 2 and 3 MiB before them, and 4 MiB at the end.
RUNS = (
    ContiguousRun(0, 1 * MIB, 8 * MIB),
    ContiguousRun(8 * MIB, 11 * MIB, 40 * MIB),
    ContiguousRun(48 * MIB, 54 * MIB, 2 * MIB),
)
SIZE = 50 * MIB
DEVICE = 60 * MIB


def make(path: Path, *, local_bytes: int = DEVICE) -> Seed:
    return Seed(
        path=path,
        fsid=uuid.UUID(int=1),
        device_uuid=uuid.UUID(int=2),
        label="label",
        device_bytes=DEVICE,
        file_bytes=local_bytes,
        metadata_bytes=16384,
        local_bytes=local_bytes,
        virtual_data=VirtualData("name", 257, SIZE, RUNS),
        chunks=3,
        chunk_bytes=GIB,
        strategy="fallocate",
    )


def rows(*runs: ContiguousRun) -> PhysicalMap:
    """A map with an extent for each MiB."""
    found = []
    for run in runs:
        for at in range(0, run.size_bytes, MIB):
            where = run.physical_offset + at
            found.append(
                MapRow(
                    run.file_offset + at, MIB, 0, "regular", MIB, where, MIB, 1, where
                )
            )
    return PhysicalMap(found)


def test_what_is_between_the_runs_is_local(tmp_path: Path) -> None:
    seed = make(tmp_path / "seed", local_bytes=55 * MIB)
    others = [(0, 1), (9, 2), (51, 3), (56, 4)]
    assert list(seed.other_ranges()) == [(a * MIB, b * MIB) for a, b in others]
    assert list(seed.local_ranges()) == [(a * MIB, b * MIB) for a, b in others[:3]]
    short = make(tmp_path / "seed", local_bytes=10 * MIB)
    assert list(short.local_ranges()) == [(0, MIB), (9 * MIB, MIB)]
    assert seed.virtual_data.device_offset == MIB
    assert seed.virtual_data.largest_run == RUNS[1]


def test_every_byte_of_the_device_is_what_it_should_be(tmp_path: Path) -> None:
    image = tmp_path / "seed"
    image.write_bytes(b"".join(i.to_bytes(4, "little") * 1024 for i in range(15360)))
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 4096 * 8)
    seed = make(image)
    contents = [
        FileSegment(offset=4 * MIB, length=8 * MIB, path=str(source)),
        MemsetSegment(offset=12 * MIB, length=20 * MIB, byte=97),
        PatternSegment(offset=32 * MIB, length=17 * MIB),
    ]
    description = seed.description(contents)
    assert description.size == DEVICE + END_BYTES
    assert not any(description.content(DEVICE, END_BYTES))
    for run in RUNS:
        for at in range(0, run.size_bytes, MIB // 2):
            place = run.physical_offset + at
            position = run.file_offset + at
            wanted = [s for s in contents if s.offset <= position < s.end]
            if not wanted:
                with pytest.raises(OSError):
                    description.content(place, 4096)
                continue
            expected = wanted[0].content(position, 4096)
            assert description.content(place, 4096) == expected, (place, position)
    for start, length in seed.other_ranges():
        expected = image.read_bytes()[start : start + length]
        assert description.content(start, length) == expected


@pytest.mark.parametrize(
    "runs",
    [
        RUNS[:2],
        RUNS[1:],
        (RUNS[0], RUNS[2], RUNS[1]),
        (RUNS[0], ContiguousRun(8 * MIB, 2 * MIB, 42 * MIB)),
    ],
)
def test_runs_that_cannot_be(runs: tuple[ContiguousRun, ...]) -> None:
    with pytest.raises(ValueError):
        VirtualData("name", 257, SIZE, runs)


def test_the_map_has_to_say_the_same(tmp_path: Path) -> None:
    virtual = make(tmp_path / "seed").virtual_data
    virtual.assert_matches(rows(*RUNS))
    moved = ContiguousRun(48 * MIB, 55 * MIB, 2 * MIB)
    merged = ContiguousRun(48 * MIB, 51 * MIB, 2 * MIB)
    for wrong in (
        rows(*RUNS[:2]),
        rows(*RUNS[:2], moved),
        rows(*RUNS[:2], merged),
        rows(RUNS[0]._replace(physical_offset=0), *RUNS[1:]),
    ):
        with pytest.raises(MappingError):
            virtual.assert_matches(wrong)
