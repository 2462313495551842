"""A whole volume on every front end: what is read through clones is what the server
defines.
"""

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.system_state import SystemState

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, UBLK
from btrfs_ublk.base.readers import READERS, read_direct
from btrfs_ublk.kernel import clone_range
from btrfs_ublk.kernel.reflink import match_checksums
from btrfs_ublk.physmap import PhysicalMap
from btrfs_ublk.server import (
    FileSegment,
    FrontEndName,
    MemsetSegment,
    PatternSegment,
    Segment,
)
from btrfs_ublk.units import BLOCK_BYTES, EIB, GIB, KIB, MIB, TIB, format_size
from btrfs_ublk.volume.temporary import Volume, volume

SIZE = 4 * EIB
CHUNK = 255 * TIB


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(BTRFS, LOOP)


@pytest.fixture
def target(sparse_path: Path) -> Path:
    path = sparse_path / "mnt"
    path.mkdir()
    return path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("fuse", marks=pytest.mark.fuse),
        pytest.param("ublk", marks=pytest.mark.ublk),
    ],
)
def front_end(request: pytest.FixtureRequest, need: Need) -> FrontEndName:
    name: FrontEndName = request.param
    need(*((UBLK,) if name == "ublk" else (FUSE, LOOP)))
    return name


@pytest.fixture(scope="module")
def made(
    need: Need, front_end: FrontEndName, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Volume]:
    """4 EiB: a file, then one byte, then nothing, then numbers up to the end."""
    need(BTRFS, LOOP)
    directory = tmp_path_factory.mktemp("volume")
    source = directory / "source"
    source.write_bytes(random.Random(2).randbytes(3 * MIB))
    contents: list[Segment] = [
        FileSegment(offset=0, length=3 * MIB, path=str(source)),
        MemsetSegment(offset=3 * MIB, length=5 * MIB, byte=98),
        PatternSegment(offset=16 * MIB, length=SIZE - 16 * MIB),
    ]
    (directory / "mnt").mkdir()
    with volume(
        directory / "mnt",
        contents,
        virtual_data_size=SIZE,
        parent=directory,
        front_end=front_end,
    ) as it:
        yield it


def content(made: Volume, offset: int, length: int) -> bytes:
    """What the server defines for a range of the virtual file."""
    start = made.seed.virtual_data.device_offset
    return made.server.description.content(start + offset, length)


# What looks at all that there is comes first, while there is no volume for all tests.


def test_a_failure_at_any_stage_undoes_all(
    front_end: FrontEndName,
    sparse_path: Path,
    target: Path,
    state_of_system: Callable[[], SystemState],
) -> None:
    before = state_of_system()
    for failing in ("seed", "server", "mapping", "sprout"):

        def fail(stage: str, thing: object, failing: str = failing) -> None:
            if stage == failing:
                raise RuntimeError(stage)

        with pytest.raises(RuntimeError, match=failing):
            with volume(
                target,
                [],
                virtual_data_size=MIB * 64,
                parent=sparse_path,
                front_end=front_end,
                observe=fail,
            ):
                raise AssertionError("it went on")
        assert state_of_system() == before


@pytest.mark.data
@pytest.mark.gate_ublk
def test_clones_read_as_the_server_defines(made: Volume) -> None:
    """Random ranges of clones from the start, both sides of chunk boundaries, the
    middle and the end; direct, buffered and mapped.
    """
    chances = random.Random(3)
    size = 2 * MIB
    places = [0, 2 * MIB, 16 * MIB, CHUNK - MIB, 2 * CHUNK - 64 * KIB]
    places += [chances.randrange(1, 16449) * CHUNK - MIB for _ in range(4)]
    places += [SIZE // 2, SIZE - size]
    for number, place in enumerate(places):
        clone = made.clone(f"clone-{number}", offset=place, size_bytes=size)
        for how, read in READERS.items():
            for _ in range(5):
                length = chances.randrange(1, 200 * KIB)
                offset = chances.randrange(0, size - length)
                expected = content(made, place + offset, length)
                assert read(clone, offset, length) == expected, (place, how, offset)
    assert made.server.stats().errors == 0


@pytest.mark.data
@pytest.mark.parametrize("size", [275 * GIB, SIZE], ids=format_size)
def test_both_sides_of_every_chunk_boundary(
    front_end: FrontEndName, sparse_path: Path, target: Path, size: int
) -> None:
    """One file of clones: start, end, middle, and across each boundary of chunks."""
    pattern = PatternSegment(offset=0, length=size)
    length = 2 * BLOCK_BYTES
    middle = size // 2 // BLOCK_BYTES * BLOCK_BYTES
    places = [0, middle, size - length]
    places += [boundary - BLOCK_BYTES for boundary in range(CHUNK, size, CHUNK)]
    with volume(
        target,
        [pattern],
        virtual_data_size=size,
        parent=sparse_path,
        front_end=front_end,
    ) as made:
        assert len(places) == 3 + made.seed.chunks - 1
        path = made.target / "boundaries"
        with made.virtual_file() as source, path.open("xb") as clone:
            match_checksums(source, clone.fileno())
            for number, place in enumerate(places):
                clone_range(
                    source,
                    clone.fileno(),
                    source_offset=place,
                    length_bytes=length,
                    target_offset=number * length,
                )
        with path.open("rb") as file:
            for place in places:
                assert file.read(length) == pattern.content(place, length), place


def test_unmapped_data_cannot_be_read_but_overwritten(made: Volume) -> None:
    clone = made.clone("unmapped", offset=8 * MIB, size_bytes=MIB)
    with pytest.raises(OSError) as caught:
        read_direct(clone, 0, BLOCK_BYTES)
    assert caught.value.errno == errno.EIO
    with pytest.raises(OSError):
        clone.read_bytes()
    with clone.open("r+b", buffering=0) as file:
        file.write(b"n" * BLOCK_BYTES)
    assert read_direct(clone, 0, BLOCK_BYTES) == b"n" * BLOCK_BYTES
    # The volume is as writable as before.
    (made.target / "other").write_text("written")


@pytest.mark.data
def test_writes_stay_in_the_clone_that_got_them(made: Volume) -> None:
    first = made.clone("first", offset=MIB, size_bytes=MIB)
    second = made.clone("second", offset=MIB, size_bytes=MIB)
    expected = bytearray(content(made, MIB, MIB))
    with first.open("r+b", buffering=0) as file:
        for offset in (0, 300_000, MIB - 10):
            file.seek(offset)
            file.write(b"0123456789")
            expected[offset : offset + 10] = b"0123456789"
    assert first.read_bytes() == expected
    assert second.read_bytes() == content(made, MIB, MIB)
    with made.virtual_file() as virtual:
        assert read_direct(virtual, MIB, MIB) == content(made, MIB, MIB)


def test_the_map_is_checked_before_use(made: Volume) -> None:
    with made.virtual_file() as virtual:
        mapping = PhysicalMap.read(virtual)
    assert len(mapping) == made.seed.chunks
    start = made.seed.virtual_data.device_offset
    assert mapping.largest_contiguous_run() == (0, start, SIZE)
