"""What btrfs-ublk-mkseed writes, as btrfs-progs, the kernel and our reader see it."""

from __future__ import annotations

import os
import struct
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import seeds as fmt
from support.seeds import (
    BLOCK,
    CHUNK,
    EIB,
    GIB,
    IDENTITY,
    KIB,
    MAX_SIZE,
    MIB,
    NAME,
    VIRTUAL_START,
    Image,
    Item,
    btrfs_check,
    digest,
    mkseed,
)

from btrfs_ublk.base.capabilities import BTRFS_PROGS

SIZES = [
    *(4 * MIB, 4 * GIB + BLOCK, CHUNK - BLOCK, CHUNK, 2 * CHUNK + 4 * GIB),
    *(1023 * CHUNK, 1024 * CHUNK, 4 * EIB, MAX_SIZE),
]

#: Of the seed that test_given_all_inputs_the_image_is_known makes.
GOLDEN = "ae71f1bb8ed39ef6cb97222d99dbb8d704e303a490dad78b463e1a02a65ca390"


@pytest.fixture(scope="module", autouse=True)
def btrfs_progs(need: Callable[..., None]) -> None:
    need(BTRFS_PROGS)


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


# What is written


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_clean_and_as_described(sparse_path: Path, size: int) -> None:
    path = sparse_path / "seed.img"
    about = mkseed("--virtual-data-size", str(size), "--label", "a label", path)
    btrfs_check(path)
    chunks = -(-size // CHUNK)
    assert about["device_bytes"] == VIRTUAL_START + round_up(size, 4 * GIB)
    assert about["file_bytes"] == path.stat().st_size == about["device_bytes"]
    assert about["virtual_data"] == {
        "filename": NAME,
        "inode": 257,
        "size": size,
        "device_offset": VIRTUAL_START,
    }
    assert (about["chunks"], about["chunk_bytes"]) == (chunks, CHUNK)
    assert about["stub_chunk"] is (chunks >= 1024)
    assert about["local_bytes"] == 256 * GIB + 64 * KIB
    assert about["metadata_bytes"] <= about["allocated_bytes"] <= 16 * MIB
    assert about["label"] == "a label"
    assert_describes(path, about)


def assert_describes(path: Path, about: dict[str, Any]) -> None:
    with path.open("rb") as file:
        image = Image(file)
        for offset in fmt.SUPER_OFFSETS:
            mirror = image.read_super(offset)
            assert mirror.bytenr == offset
            assert mirror.fsid == uuid.UUID(about["fsid"]).bytes
            assert mirror.device_uuid == uuid.UUID(about["device_uuid"]).bytes
            assert mirror.label == about["label"].encode()
            assert mirror.total_bytes == about["device_bytes"]
            assert mirror.flags == 1 | 1 << 32  # written, seeding
            assert (mirror.compat_ro_flags, mirror.incompat_flags) == (0xB, 0x363)


def check_invariants(image: Image, about: dict[str, Any]) -> None:
    """That all trees tell the same story; read without the code that wrote them."""
    roots = image.roots()
    chunk_tree = list(image.items(image.super.chunk_root))
    chunks = [item for item in chunk_tree if item.type == fmt.CHUNK_ITEM]
    devices = list(image.items(roots[fmt.DEV_TREE]))
    groups = list(image.items(roots[fmt.BLOCK_GROUP_TREE]))
    files = list(image.items(roots[fmt.FS_TREE]))
    extents = list(image.items(roots[fmt.EXTENT_TREE]))
    free_space = list(image.items(roots[fmt.FREE_SPACE_TREE]))
    for owner, root in roots.items():
        if owner not in (2, 4, 5, 10, 11):
            list(image.items(root))

    # Chunks, device extents and block groups are one to one, and logical is physical.
    placed = [(item.offset, item.unpack("Q")[0]) for item in chunks]
    assert placed == [(item.offset, item.unpack("QQQQ")[3]) for item in devices]
    assert placed == [(item.objectid, item.offset) for item in groups]
    for chunk in chunks:
        devid, physical = chunk.unpack("QQ", 48)
        assert (devid, physical) == (1, chunk.offset)
    for (start, length), (following, _) in zip(placed, placed[1:]):
        assert start + length <= following
    for mirror in fmt.SUPER_OFFSETS:
        assert not any(s < mirror + 64 * KIB and s + n > mirror for s, n in placed)
    assert placed[-1][0] + placed[-1][1] == image.super.total_bytes
    total = sum(length for _, length in placed)
    assert chunk_tree[0].unpack("QQQ") == (1, image.super.total_bytes, total)

    # The virtual file: one extent per chunk, from the chunk's start.
    data = [item for item in files if item.type == fmt.EXTENT_DATA]
    virtual = [(s, n) for s, n in placed if s >= VIRTUAL_START]
    size = about["virtual_data"]["size"]
    assert len(data) == len(virtual) == about["chunks"]
    position = 0
    for item, (start, length) in zip(data, virtual):
        assert item.key == (257, fmt.EXTENT_DATA, position)
        assert item.data[20] == 1  # regular
        disk, disk_bytes, offset, bytes_ = item.unpack("QQQQ", 21)
        assert (disk, offset, disk_bytes) == (VIRTUAL_START + position, 0, bytes_)
        assert disk == start and bytes_ <= length and length % (4 * GIB) == 0
        position += bytes_
    assert position == size

    # Extents: each block and each data extent once, and nothing else.
    blocks = {(b.bytenr, fmt.METADATA_ITEM, b.level): b.owner for b in image.blocks}
    assert len(blocks) == len({bytenr for bytenr, _, _ in blocks})
    expected = {
        (VIRTUAL_START + item.offset, fmt.EXTENT_ITEM, item.unpack("Q", 29)[0])
        for item in data
    }
    assert {item.key for item in extents} == expected | blocks.keys()
    for item in extents:
        if item.type == fmt.METADATA_ITEM:
            assert item.unpack("BQ", 24) == (176, blocks[item.key])
        else:
            reference = (178, 5, 257, item.objectid - VIRTUAL_START, 1)
            assert item.unpack("BQQQI", 24) == reference
    assert about["metadata_bytes"] == len(blocks) * image.super.node_bytes

    check_space(image, groups, extents, free_space)
    check_subvolume(image)


def check_subvolume(image: Image) -> None:
    """The default one, and where it is: in the top-level directory, by one name."""
    items = {item.key: item.data for item in image.items(image.super.root)}
    backref = items[256, fmt.ROOT_BACKREF, 5]
    assert backref == items[5, fmt.ROOT_REF, 256]
    directory, index, length = struct.unpack_from("<QQH", backref)
    assert (directory, backref[18:], length) == (256, b"files", 5)
    entries = {item.key: item.data for item in image.items(image.roots()[fmt.FS_TREE])}
    entry = entries[256, fmt.DIR_INDEX, index]
    location = struct.pack("<QBQ", 256, fmt.ROOT_ITEM, 2**64 - 1)
    assert (entry[:17], entry[29], entry[30:]) == (location, 2, b"files")
    assert entry in [data for key, data in entries.items() if key[1] == fmt.DIR_ITEM]
    (default,) = (data for key, data in items.items() if key[:2] == (6, fmt.DIR_ITEM))
    assert (default[:17], default[30:]) == (location, b"default")
    assert [item.type for item in image.items(image.roots()[256])] == [1, 12]


def check_space(
    image: Image, groups: list[Item], extents: list[Item], free_space: list[Item]
) -> None:
    """Used and free extents fill each block group without gap or overlap."""
    pieces = []
    for item in extents:
        block = item.type == fmt.METADATA_ITEM
        length = image.super.node_bytes if block else item.offset
        pieces.append((item.objectid, length, True))
    free = [item for item in free_space if item.type == fmt.FREE_SPACE_EXTENT]
    infos = [item for item in free_space if item.type == fmt.FREE_SPACE_INFO]
    pieces += [(item.objectid, item.offset, False) for item in free]
    pieces.sort()
    used_total = 0
    at = 0
    for group, info in zip(groups, infos, strict=True):
        assert (info.objectid, info.offset) == (group.objectid, group.offset)
        position, used, free_count = group.objectid, 0, 0
        while at < len(pieces) and pieces[at][0] < group.objectid + group.offset:
            start, length, is_used = pieces[at]
            assert start == position
            position += length
            used += length * is_used
            free_count += not is_used
            at += 1
        assert position == group.objectid + group.offset
        assert group.unpack("Q")[0] == used
        assert info.unpack("II") == (free_count, 0)
        used_total += used
    assert at == len(pieces)
    assert image.super.bytes_used == used_total


sizes = st.one_of(
    st.integers(4 * MIB // BLOCK, 64 * GIB // BLOCK),
    st.integers(4 * MIB // BLOCK, MAX_SIZE // BLOCK // 512),
    st.integers(-3, 3).map(lambda n: n + 3 * CHUNK // BLOCK),
).map(lambda blocks: blocks * BLOCK)
names = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1
).filter(lambda name: name not in (".", "..") and len(name.encode()) <= 255)
uuids = st.uuids(allow_nil=False).map(str)


@settings(max_examples=30, deadline=None)
@given(sizes, names, uuids, st.integers(1, 400), st.data())
def test_any_seed_keeps_the_invariants(
    size: int, name: str, fsid: str, chunk_count: int, data: st.DataObject
) -> None:
    chunk = max(min(round_up(size // chunk_count, 4 * GIB), CHUNK), 4 * GIB)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "seed.img"
        about = mkseed(
            *("--metadata-only", f"--virtual-data-size={size}", f"--fsid={fsid}"),
            *(f"--virtual-data-filename={name}", f"--chunk-size={chunk}", path),
        )
        assert about["file_bytes"] == about["local_bytes"]
        assert about["chunk_bytes"] == chunk
        assert about["virtual_data"]["filename"] == name and about["fsid"] == fsid
        assert_describes(path, about)
        with path.open("rb") as file:
            image = Image(file)
            check_invariants(image, about)
            files = list(image.items(image.roots()[fmt.FS_TREE]))
        entries = [i for i in files if i.type in (fmt.DIR_ITEM, fmt.DIR_INDEX)]
        found = sorted(entry.data[30:].decode() for entry in entries)
        assert found == sorted([name, name, "files", "files"])
        if data.draw(st.integers(0, 5)) == 0:
            # What the device has beyond the local part is a hole here.
            os.truncate(path, about["device_bytes"])
            btrfs_check(path)


# The same, and not the same


def test_given_all_inputs_the_image_is_known(tmp_path: Path) -> None:
    """A change of this digest is a change of the format: does it have to be?"""
    mkseed(
        *IDENTITY, "--metadata-only", "--virtual-data-size=1P", tmp_path / "seed.img"
    )
    assert digest(tmp_path / "seed.img") == GOLDEN


# Speed


# The kernel
