"""Seeds of the fallocate strategy: made by mkfs.btrfs and the kernel's allocator."""

import os
import resource
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faults import fail_at
from support.needs import Need
from support.seeds import btrfs_check
from support.system_state import SystemState

from btrfs_ublk.base.capabilities import BTRFS_PROGS, MKFS_BTRFS, Helper
from btrfs_ublk.base.helpers import SEED
from btrfs_ublk.base.process import run
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel import clone_file, loop_device
from btrfs_ublk.kernel.attributes import IMMUTABLE, NO_COW, get_attributes
from btrfs_ublk.seed import Seed
from btrfs_ublk.seed import fallocate as module
from btrfs_ublk.seed import inspect_seed, make_fallocate_seed, make_seed_by
from btrfs_ublk.server import PatternSegment
from btrfs_ublk.units import BLOCK_BYTES, GIB, KIB, MIB
from btrfs_ublk.volume.sprout import assert_mapping, sprout, virtual_file_of

pytestmark = pytest.mark.data

SIZE = 5 * GIB
EXTENT = 256 * MIB


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(MKFS_BTRFS, BTRFS_PROGS, Helper(SEED))


@pytest.fixture
def target(sparse_path: Path) -> Path:
    path = sparse_path / "mnt"
    path.mkdir()
    return path


def content(offset: int, length: int) -> bytes:
    """What a test puts into the virtual file: each 8 bytes hold their file offset."""
    words = range(offset, offset + length, 8)
    return struct.pack(f"<{len(words)}Q", *words)


def assert_clones_read(seed: Seed, target: Path, directory: Path) -> None:
    """Put numbers behind the virtual data, in the image, where the seed says that these
    are; clone at the start, middle and end, across each seam between runs, and where
    chunks and extents begin; read what the kernel finds there.
    """
    virtual = seed.virtual_data
    length = min(64 * KIB, virtual.size)
    seams = [run.file_offset for run in virtual.runs[1:]]
    chunk = seed.chunk_bytes
    # In the device, chunks follow each other; in the file, those of the last run.
    last = virtual.runs[-1]
    seam = -(-last.physical_offset // chunk) * chunk - last.physical_offset
    seam += last.file_offset
    seams += [EXTENT, 2 * EXTENT, 1000 * EXTENT, seam, virtual.size // 2]
    places = {0, virtual.size - length}
    for at in seams:
        place = (at - length // 2) // BLOCK_BYTES * BLOCK_BYTES
        if 0 <= place <= virtual.size - length:
            places.add(place)
    with seed.path.open("r+b") as file:
        for place in places:
            for at in range(place, place + length, BLOCK_BYTES):
                run_of = next(
                    r for r in virtual.runs if at < r.file_offset + r.size_bytes
                )
                file.seek(run_of.physical_offset + at - run_of.file_offset)
                file.write(content(at, BLOCK_BYTES))
    with (
        loop_device(seed.path, read_only=True) as loop,
        sprout(
            loop.path,
            target,
            parent=directory,
            validate=lambda at: assert_mapping(seed, at),
        ),
        virtual_file_of(seed, target) as file_path,
    ):
        assert os.listdir(target) == []
        for number, place in enumerate(sorted(places)):
            clone = target / f"clone-{number}"
            clone_file(file_path, clone, source_offset=place, size_bytes=length)
            assert read_direct(clone, 0, length) == content(place, length), place
        (target / "own").write_bytes(b"own")
        with (target / "clone-0").open("r+b") as clone_0:
            clone_0.write(b"overwritten")
        os.sync()
        assert (target / "clone-0").read_bytes()[:12] == b"overwritten\0"
        assert file_path.open("rb").read(16) == content(0, 16)
        assert get_attributes(file_path) & (IMMUTABLE | NO_COW) == IMMUTABLE | NO_COW
        assert not get_attributes(target) & NO_COW
        assert file_path.stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize(
    "size",
    [
        5 * GIB,
        pytest.param(275 * GIB + BLOCK_BYTES, marks=pytest.mark.thorough),
        pytest.param(300 * GIB, marks=pytest.mark.thorough),
    ],
)
def test_it_mounts_sprouts_and_clones(
    sparse_path: Path, target: Path, size: int
) -> None:
    path = sparse_path / "seed.img"
    seed = make_fallocate_seed(path, virtual_data_size=size)
    assert {*sparse_path.iterdir()} == {target, path}
    btrfs_check(path)
    virtual = seed.virtual_data
    assert (virtual.size, seed.strategy) == (size, "fallocate")
    assert seed.device_bytes == seed.file_bytes == path.stat().st_size
    assert seed.local_bytes <= seed.device_bytes
    assert len(virtual.runs) <= 4 and seed.chunk_bytes == GIB
    assert virtual.largest_run.size_bytes >= size * 8 // 10
    assert_clones_read(seed, target, sparse_path)


def test_what_was_asked_for_is_there(sparse_path: Path) -> None:
    path = sparse_path / "seed.img"
    fsid = uuid.uuid4()
    path.write_text("old")
    seed = make_seed_by(
        "fallocate",
        path,
        virtual_data_size=SIZE,
        virtual_data_filename="-Ж",
        label="a label",
        fsid=fsid,
        metadata_only=True,
        force=True,
    )
    assert (seed.fsid, seed.label, seed.virtual_data.filename) == (
        *(fsid, "a label", "-Ж"),
    )
    assert path.stat().st_size == seed.file_bytes == seed.local_bytes < SIZE
    dump = run(["btrfs", "inspect-internal", "dump-super", path], timeout_s=10).stdout
    assert str(fsid) in dump and "a label" in dump and "SEEDING" in dump
    assert inspect_seed(path)["default_subvolume"] == 256  # and not the virtual file's
    description = seed.description([PatternSegment(offset=0, length=SIZE)])
    kinds = [segment.kind for segment in description.segments]
    assert kinds[0] == "file" and "pattern" in kinds


def test_what_cannot_be_is_refused(sparse_path: Path) -> None:
    (sparse_path / "there").write_text("keep")
    (sparse_path / "directory").mkdir()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"virtual_data_size": SIZE + 1}, "not a multiple"),
        ({"virtual_data_size": 4 * GIB}, "mega-extent"),
        ({"virtual_data_size": 300 * GIB + BLOCK_BYTES}, "mega-extent"),
        ({"virtual_data_filename": "a/b"}, "not the name"),
        ({"path": "there"}, "exists"),
        ({"path": "directory", "force": True}, "not a regular file"),
        ({"timeout_s": -1.0}, "takes too long"),
    ]
    for keywords, reason in cases:
        given = {"virtual_data_size": SIZE, "path": "seed.img"} | keywords
        path = sparse_path / given.pop("path")
        with pytest.raises(BtrfsUblkError, match=reason):
            make_fallocate_seed(path, **given)
        assert sorted(os.listdir(sparse_path)) == ["directory", "there"]
        assert (sparse_path / "there").read_text() == "keep"


def test_a_file_system_that_holds_no_such_file_says_so(sparse_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (GIB, limits[1]))
    try:
        with pytest.raises(UsageError, match="File too large"):
            make_fallocate_seed(sparse_path / "seed.img", virtual_data_size=SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(sparse_path.iterdir()) == []


#: Steps of making one, and where the gate has an error.
STEPS = ("tempdir", "_make_sparse", "_format", "_flip", "loop_device", "mounted")
STEPS += ("_allocate", "add_attributes", "PhysicalMap.read", "_publish")
IN_GATE = [("mounted", "after"), ("_publish", "before"), ("_publish", "after")]


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *IN_GATE,
        *(
            pytest.param(name, "before", marks=pytest.mark.thorough)
            for name in STEPS[:-1]
        ),
    ],
)
def test_an_error_at_any_step_leaves_nothing(
    sparse_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state_of_system: Callable[[], SystemState],
    name: str,
    when: str,
) -> None:
    error: BaseException = KeyboardInterrupt()
    if when == "before":
        error = BtrfsUblkError("injected")
    fail_at(monkeypatch, module, name, when, error)
    before = state_of_system()
    path = sparse_path / "seed.img"
    with pytest.raises(type(error)) as caught:
        make_fallocate_seed(path, virtual_data_size=SIZE)
    assert caught.value is error
    # The result is there as soon as it has its name.
    path.unlink(missing_ok=not (name == "_publish" and when == "after"))
    assert state_of_system() == before
