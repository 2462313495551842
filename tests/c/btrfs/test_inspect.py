"""The layout that is printed of seeds; damaged images give an error, never a crash."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.sanitized_build import SANITIZER_ENVIRONMENT, run_sanitized
from support.seeds import CHUNK, EIB, GIB, KIB, MIB, NAME, TIB, mkseed

from btrfs_ublk.base.helpers import HELPERS_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.seed.inspect import inspect_seed


@pytest.fixture(autouse=True)
def sanitized_helpers(
    sanitized_build: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setenv(HELPERS_VARIABLE, str(sanitized_build / "csrc/tools"))
    for name, value in SANITIZER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield


def test_a_seed_is_described_in_full(tmp_path: Path) -> None:
    path = tmp_path / "seed.img"
    fsid = "00112233-4455-6677-8899-aabbccddeeff"
    about = mkseed(*("--label=a label", "--metadata-only", f"--fsid={fsid}", path))
    layout = inspect_seed(path)
    sizes = ("total_bytes", "shortest_bytes", "longest_bytes")
    chunks = [
        ("SYSTEM", "SINGLE", 1, 4 * MIB, 4 * MIB, 4 * MIB),
        ("METADATA", "SINGLE", 1, 8 * MIB, 8 * MIB, 8 * MIB),
        ("DATA", "RAID0", 1, MIB, MIB, MIB),
        ("DATA", "SINGLE", 16449, 4 * EIB, 64 * TIB, CHUNK),
    ]
    assert layout == {
        "path": str(path),
        "fsid": fsid,
        "device_uuid": about["device_uuid"],
        "label": "a label",
        "generation": 1,
        "device_bytes": 4 * EIB + 512 * GIB,
        "local_bytes": 256 * GIB + 65536,
        "file_bytes": 256 * GIB + 65536,
        "used_bytes": 4 * EIB + about["metadata_bytes"],
        "node_bytes": 16384,
        "checksum": "crc32c",
        "flags": ["WRITTEN", "SEEDING"],
        "incompat_flags": [
            *("MIXED_BACKREF", "DEFAULT_SUBVOL", "BIG_METADATA", "EXTENDED_IREF"),
            *("SKINNY_METADATA", "NO_HOLES"),
        ],
        "compat_ro_flags": [
            *("FREE_SPACE_TREE", "FREE_SPACE_TREE_VALID", "BLOCK_GROUP_TREE")
        ],
        "seeding": True,
        "strategy": "mega-extent",
        "subvolumes": 2,
        "default_subvolume": 256,
        "chunks": [
            dict(zip(("type", "profile", "count", *sizes), chunk)) for chunk in chunks
        ],
        "new_files_nodatasum": False,
        "virtual_data": {
            "filename": NAME,
            "inode": 257,
            "size": 4 * EIB,
            "extents": 16449,
            "preallocated_extents": 0,
            "device_offset": 512 * GIB,
            "flags": ["NODATASUM", "NODATACOW", "IMMUTABLE"],
        },
    }


def test_damage_is_named(sparse_path: Path) -> None:
    path = sparse_path / "seed.img"
    mkseed("--virtual-data-size=1G", "--metadata-only", path)
    with path.open("r+b") as file:
        file.seek(5 * MIB + 4000)
        file.write(b"damage")
    with pytest.raises(BtrfsUblkError, match="the checksum is wrong"):
        inspect_seed(path)


@pytest.mark.parametrize("name", ["no-such-file", "."])
def test_what_is_no_image_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BtrfsUblkError):
        inspect_seed(tmp_path / name)


@pytest.mark.parametrize(
    ("size", "readable"),
    [
        *((0, False), (64 * KIB + 4095, False), (MIB + 16 * KIB, False)),
        *((5 * MIB + 5000, False), (64 * MIB, True), (256 * GIB, True)),
    ],
)
def test_truncated_images(sparse_path: Path, size: int, readable: bool) -> None:
    image = sparse_path / "image"
    mkseed("--virtual-data-size=20G", "--chunk-size=4G", "--metadata-only", image)
    os.truncate(image, size)
    with nullcontext() if readable else pytest.raises(BtrfsUblkError):
        inspect_seed(image)


@pytest.mark.parametrize(
    ("size", "options", "iterations"),
    [
        ("20G", [], 500),
        ("20G", ["--metadata-profile=dup"], 500),
        ("4T", [], 150),  # trees of two levels
    ],
)
def test_many_changes_in_one_process(
    sparse_path: Path,
    sanitized_build: Path,
    size: str,
    options: list[str],
    iterations: int,
) -> None:
    image = sparse_path / "seed.img"
    mkseed(
        *(f"--virtual-data-size={size}", "--chunk-size=4G", "--metadata-only"),
        *(*options, image),
    )
    run_sanitized(
        *(sanitized_build / "csrc/tests/fuzz-reader", "--iterations", iterations),
        image,
        environment={
            # More at once would be for what an image claims, not for what it has.
            "ASAN_OPTIONS": SANITIZER_ENVIRONMENT["ASAN_OPTIONS"]
            + ":max_allocation_size_mb=256"
        },
    )
