"""Real maps: what the helper says is on the devices must be there, byte for byte.

The helper runs with sanitizers throughout.
"""

import json
import os
import random
import struct
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.sanitized_build import SANITIZER_ENVIRONMENT, sanitized_build

from btrfs_ublk.base.helpers import HELPERS_VARIABLE, MAP_PHYSICAL
from btrfs_ublk.base.process import run
from btrfs_ublk.kernel import clone_range, loop_device, mounted, tempdir
from btrfs_ublk.physmap import MappingError, MapRow, PhysicalMap

sanitizers = sanitized_build

BLOCK = 4096
MIB = 1 << 20
IMAGE_BYTES = 256 * MIB
TIMEOUT_S = 60

Row = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def helper(sanitizers: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HELPERS_VARIABLE, str(sanitizers / "csrc" / "tools"))
        for name, value in SANITIZER_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield sanitizers / "csrc" / "tools" / MAP_PHYSICAL


@dataclass(frozen=True)
class FileSystem:
    """A mounted btrfs and the images of its devices, by devid."""

    path: Path
    images: dict[int, Path]

    def file(self, content: bytes, *, name: str = "file") -> Path:
        path = self.path / name
        path.write_bytes(content)
        return path


def devid_of(image: Path) -> int:
    """struct btrfs_super_block at 64 KiB, its dev_item.devid."""
    with image.open("rb") as file:
        file.seek((64 << 10) + 201)
        devid: int = struct.unpack("<Q", file.read(8))[0]
    return devid


@contextmanager
def btrfs(
    parent: Path,
    *mkfs_options: str,
    devices: int = 1,
    options: Sequence[str] = (),
    image_bytes: int = IMAGE_BYTES,
) -> Iterator[FileSystem]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempdir(parent=parent))
        target = directory / "mnt"
        target.mkdir()
        images, loops = [], []
        for number in range(devices):
            image = directory / f"image{number}"
            image.touch()
            os.truncate(image, image_bytes)
            images.append(image)
            loops.append(stack.enter_context(loop_device(image)).path)
        run(["mkfs.btrfs", "-q", "-K", *mkfs_options, *loops], timeout_s=TIMEOUT_S)
        stack.enter_context(
            mounted(
                loops[0],
                target,
                options=[*(f"device={path}" for path in loops), *options],
            )
        )
        yield FileSystem(target, {devid_of(image): image for image in images})


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def text(size: int) -> bytes:
    """What compresses well and is different in each block."""
    return b"".join(b"%-64d" % i for i in range(size // 64 + 1))[:size]


def rows_of(path: Path) -> list[Row]:
    """As JSON; the other two forms must say the same."""
    done = run(
        [os.environ[HELPERS_VARIABLE] + "/" + MAP_PHYSICAL, "--json", path],
        timeout_s=TIMEOUT_S,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    plain = [MapRow(**{k: r[k] for k in MapRow._fields}) for r in rows]
    assert list(PhysicalMap.read(path)) == plain
    done = run(
        [os.environ[HELPERS_VARIABLE] + "/" + MAP_PHYSICAL, path], timeout_s=TIMEOUT_S
    )
    names, *lines = done.stdout.splitlines()
    assert names.lower().replace(" ", "_").split("\t") == list(MapRow._fields)
    texts = ["" if x is None else str(x) for row in plain for x in row]
    assert [x for line in lines for x in line.split("\t")] == texts
    return rows


def stored_copies(system: FileSystem, rows: list[Row]) -> list[bytes]:
    """Each copy of one logical extent, put together from its pieces."""
    copies = []
    for copy in sorted({row["copy"] for row in rows}):
        data = b""
        for row in (row for row in rows if row["copy"] == copy):
            assert row["piece_offset"] == len(data)
            with system.images[row["devid"]].open("rb") as image:
                image.seek(row["physical_offset"])
                data += image.read(row["physical_size"])
        assert len(data) == rows[0]["logical_size"]
        copies.append(data)
    return copies


def check_against_devices(system: FileSystem, path: Path) -> list[Row]:
    """Every row's bytes, read from where it says, are what the file holds there."""
    rows = rows_of(path)
    content = path.read_bytes()
    position = 0
    for offset in sorted({row["file_offset"] for row in rows}):
        here = [row for row in rows if row["file_offset"] == offset]
        size, kind = here[0]["file_size"], here[0]["extent_type"]
        assert offset == position
        position = offset + size
        expected = content[offset:position]
        if kind in ("hole", "prealloc"):
            assert not expected.strip(b"\0")
        if kind.startswith("inline") or kind == "hole":
            assert len(here) == 1
            assert all(here[0][key] is None for key in list(here[0])[4:])
            continue
        start = here[0]["extent_offset"]
        for stored in stored_copies(system, here):
            if kind == "regular,compression=zlib":
                stored = zlib.decompressobj().decompress(stored)
            elif kind == "regular,compression=zstd":
                assert stored[:4] == bytes.fromhex("28b52ffd")  # RFC 8878, 3.1.1
                continue
            elif kind == "prealloc":
                continue
            assert stored[start : start + len(expected)] == expected
    assert position >= len(content)
    return rows


def types(rows: list[Row]) -> list[str]:
    return [row["extent_type"] for row in rows]


@pytest.fixture(scope="module")
def kept(test_root: Path) -> Iterator[FileSystem]:
    with btrfs(test_root) as system:
        yield system


@pytest.fixture
def single(kept: FileSystem) -> Iterator[FileSystem]:
    """One device, data once; empty at the start of each test."""
    yield kept
    for path in kept.path.iterdir():
        path.unlink()


def test_regular(single: FileSystem) -> None:
    path = single.file(noise(3 * MIB + 100))
    rows = check_against_devices(single, path)
    assert set(types(rows)) == {"regular"}
    assert {row["profile"] for row in rows} == {"single"}
    mapped = PhysicalMap.read(path)
    mapped.assert_plain()
    assert mapped.file_bytes() == 3 * MIB + BLOCK


def test_delayed_data_is_written_first(single: FileSystem) -> None:
    for turn in range(2):
        with (single.path / "new").open("wb") as file:
            file.write(noise(MIB, seed=turn))
            file.flush()
            rows = rows_of(single.path / "new")
            assert set(types(rows)) == {"regular"}
            assert sum(row["file_size"] for row in rows) == MIB
    check_against_devices(single, single.path / "new")


def test_inline_and_empty(single: FileSystem) -> None:
    (row,) = check_against_devices(single, single.file(b"x" * 1000))
    assert (row["extent_type"], row["file_size"]) == ("inline", 1000)
    assert rows_of(single.file(b"")) == []


def test_holes(single: FileSystem) -> None:
    path = single.file(b"")
    with path.open("r+b") as file:
        file.seek(MIB)
        file.write(noise(BLOCK))
        file.truncate(3 * MIB + 1)
    rows = check_against_devices(single, path)
    assert types(rows) == ["hole", "regular", "hole"]
    assert [row["file_offset"] for row in rows] == [0, MIB, MIB + BLOCK]
    assert rows[-1]["file_size"] == 2 * MIB
    os.truncate(path, 1 << 62)
    last = rows_of(path)[-1]
    assert last["extent_type"] == "hole"
    assert last["file_offset"] + last["file_size"] == 1 << 62
    only_hole = single.file(b"", name="hole")
    os.truncate(only_hole, 5000)
    assert [(r["extent_type"], r["file_size"]) for r in rows_of(only_hole)] == [
        ("hole", 8192)
    ]


def test_prealloc(single: FileSystem) -> None:
    path = single.file(b"", name="prealloc")
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 4 * MIB)
        file.seek(MIB)
        file.write(noise(MIB))
    rows = check_against_devices(single, path)
    assert types(rows) == ["prealloc", "regular", "prealloc"]
    assert [row["extent_offset"] for row in rows] == [0, MIB, 2 * MIB]
    assert len({row["logical_offset"] for row in rows}) == 1
    run(["fallocate", "--keep-size", "-o", "8M", "-l", "1M", path], timeout_s=TIMEOUT_S)
    assert types(rows_of(path))[3:] == ["hole", "prealloc"]


@pytest.mark.parametrize("algorithm", ["zlib", "zstd"])
def test_compressed(test_root: Path, algorithm: str) -> None:
    with btrfs(test_root, options=[f"compress-force={algorithm}"]) as system:
        path = system.file(text(MIB))
        rows = check_against_devices(system, path)
        assert set(types(rows)) == {f"regular,compression={algorithm}"}
        assert all(row["logical_size"] < row["file_size"] for row in rows)
        with pytest.raises(MappingError, match="all regular"):
            PhysicalMap.read(path).assert_plain()
        small = check_against_devices(system, system.file(b"a" * 2000, name="small"))
        assert types(small) == [f"inline,compression={algorithm}"]
        part = system.file(b"", name="part")
        clone_range(path, part, source_offset=64 << 10, length_bytes=16 << 10)
        (row,) = check_against_devices(system, part)
        assert (row["extent_offset"], row["file_size"]) == (64 << 10, 16 << 10)


def test_a_clone_with_an_offset(single: FileSystem) -> None:
    source = single.file(noise(2 * MIB), name="source")
    (whole,) = check_against_devices(single, source)
    target = single.file(noise(BLOCK), name="target")
    clone_range(
        source,
        target,
        source_offset=MIB,
        length_bytes=3 * BLOCK,
        target_offset=10 * BLOCK,
    )
    rows = check_against_devices(single, target)
    assert types(rows) == ["regular", "hole", "regular"]
    assert (rows[2]["extent_offset"], rows[2]["file_size"]) == (MIB, 3 * BLOCK)
    for key in ("logical_size", "logical_offset", "physical_offset", "physical_size"):
        assert rows[2][key] == whole[key]
    mapped = PhysicalMap.read(target)
    assert mapped.largest_contiguous_run().size_bytes == 3 * BLOCK
    assert mapped.largest_contiguous_run().physical_offset == (
        whole["physical_offset"] + MIB
    )


#: Profile, devices, copies.
PROFILES = [
    *(("dup", 1, 2), ("raid0", 3, 1), ("raid1c3", 3, 3)),
    *(("raid10", 5, 2), ("raid5", 3, 1), ("raid6", 4, 1)),
]


@pytest.mark.parametrize("profile, devices, copies", PROFILES)
def test_profiles(test_root: Path, profile: str, devices: int, copies: int) -> None:
    with btrfs(test_root, "-d", profile, "-m", profile, devices=devices) as system:
        path = system.file(noise(2 * MIB + 12345))
        # A second extent, not at the start of a row of stripes.
        with path.open("ab") as file:
            os.fsync(file.fileno())
            file.write(noise(MIB, seed=2))
        rows = check_against_devices(system, path)
        assert {row["profile"] for row in rows} == {profile}
        assert {row["copy"] for row in rows} == set(range(copies))
        # RAID10 leaves an odd device out.
        used = devices - devices % 2 if profile == "raid10" else devices
        assert len({row["devid"] for row in rows}) == used
        pieces = {(row["file_offset"], row["piece_offset"]) for row in rows}
        assert len(rows) == len(pieces) * copies
        striped = profile in ("raid0", "raid10", "raid5", "raid6") and devices > 1
        assert striped == any(row["physical_size"] <= 64 << 10 for row in rows)


def test_subvolumes_links_and_read_only(test_root: Path) -> None:
    with btrfs(test_root) as system:
        for name in ("one", "two"):
            run(
                ["btrfs", "subvolume", "create", system.path / name],
                timeout_s=TIMEOUT_S,
            )
        # The first files of two subvolumes have the same inode number.
        one = system.file(noise(MIB, seed=1), name="one/file")
        two = system.file(noise(MIB, seed=2), name="two/file")
        assert one.stat().st_ino == two.stat().st_ino
        link = system.path / "link"
        link.symlink_to("two/file")
        assert check_against_devices(system, one) != check_against_devices(system, two)
        assert rows_of(link) == rows_of(two)
        before = rows_of(one)
        run(["mount", "-o", "remount,ro", system.path], timeout_s=TIMEOUT_S)
        assert rows_of(one) == before
        done = run(["btrfs-ublk", "map-physical", "--json", one], timeout_s=TIMEOUT_S)
        assert [json.loads(line) for line in done.stdout.splitlines()] == before


def test_refusals(single: FileSystem, helper: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "fifo")
    for arguments, message in (
        ([single.path], "is a directory"),
        ([single.path / "no"], "No such file"),
        ([tmp_path / "file"], "not on a btrfs file system"),
        ([tmp_path / "fifo"], "not a regular file"),
        ([], "one PATH is needed"),
        (["--output-fd", "77", "a"], "'77' is not an open file descriptor"),
    ):
        done = subprocess.run(
            [helper, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert (done.returncode, done.stdout) == (2, ""), message
        assert message in done.stderr and "Sanitizer" not in done.stderr, message
