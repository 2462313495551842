"""What btrfs-ublk-mkseed writes, as btrfs-progs, the kernel and our reader see it."""

import os
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
    btrfs_check,
    digest,
    mkseed,
)

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.seed.inspect import inspect_seed

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
@given(sizes, names, uuids, st.integers(1, 400))
def test_any_seed_keeps_the_invariants(
    size: int, name: str, fsid: str, chunk_count: int
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
        assert inspect_seed(path)["virtual_data"]["filename"] == name
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
