"""The offline check: healthy seeds are clean, other file systems are told apart."""

from pathlib import Path

import pytest
from support.seeds import CHUNK, EIB, GIB, MAX_SIZE, MIB, mkseed

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.seed.check import check_seed

pytestmark = pytest.mark.usefixtures("sanitized_helpers")


@pytest.mark.parametrize(
    ("profile", "metadata_only"), [("single", False), ("dup", True)]
)
@pytest.mark.parametrize(
    "size", [4 * MIB, 4 * GIB + 4096, 275 * GIB, CHUNK + 4096, 4 * EIB, MAX_SIZE]
)
def test_seeds_are_clean(
    sparse_path: Path, size: int, metadata_only: bool, profile: str
) -> None:
    path = sparse_path / "seed.img"
    options = ["--metadata-only"] if metadata_only else []
    about = mkseed(
        *(f"--virtual-data-size={size}", f"--metadata-profile={profile}"),
        *(*options, path),
    )
    report = check_seed(path)
    assert report["violations"] == [] and report["notes"] == []
    assert report["clean"] and report["seeding"] and report["strategy"] == "mega-extent"
    assert report["tree_blocks"] * 16384 == about["metadata_bytes"]


@pytest.mark.parametrize("name", ["no-such-file", "."])
def test_what_is_no_image_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BtrfsUblkError):
        check_seed(tmp_path / name)
