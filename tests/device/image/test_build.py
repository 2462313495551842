"""Sealed images: what was put in is what the kernel shows, and checkers are content."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from support import trees
from support.images import (
    as_root,
    assemble,
    btrfs_check,
    directory,
    mkimage,
    mounted_image,
    small_tree,
    three_layers,
)
from support.trees import describe, differences

from btrfs_ublk.base.capabilities import BTRFS_PROGS


@pytest.mark.data
@as_root
@pytest.mark.parametrize(
    ("compression", "checksum"),
    [
        ("none", "crc32c"),
        pytest.param("none", "blake2b", marks=pytest.mark.thorough),
        pytest.param("zstd:3", "xxhash64", marks=pytest.mark.thorough),
        ("zstd:3", "sha256"),
    ],
)
def test_the_kernel_shows_what_was_put_in(
    sparse_path: Path, need: Callable[..., None], compression: str, checksum: str
) -> None:
    """All that is rare, byte by byte; `btrfs check` and the kernel are content."""
    need(BTRFS_PROGS)
    # So many links that their names need more than one item.
    tree = trees.make(sparse_path / "tree", links=4000)
    small_tree(tree / "small")
    report = mkimage(
        sparse_path / "image",
        directory(tree),
        compression=compression,
        checksum=checksum,
    )
    whole = assemble(sparse_path / "image")
    btrfs_check(whole)
    with mounted_image(whole, sparse_path / "mount") as mount:
        assert sorted(os.listdir(mount)) == ["layers", "rootfs"]
        assert os.readlink(mount / "rootfs") == f"layers/{report['layers'][0]['name']}"
        assert differences(describe(tree), describe(mount / "rootfs")) == []
        holes = (mount / "rootfs/contents/sparse-8T").stat()
        assert holes.st_size == 8 << 40 and holes.st_blocks < 100
        with pytest.raises(OSError):
            (mount / "rootfs/new").write_bytes(b"")


def names_in(top: Path) -> set[str]:
    return {
        str(Path(directory, name).relative_to(top))
        for directory, _, names in os.walk(top)
        for name in names
    }


@pytest.mark.data
def test_each_layer_shows_its_own_content(
    sparse_path: Path, need: Callable[..., None]
) -> None:
    need(BTRFS_PROGS)
    report = mkimage(sparse_path / "image", *three_layers(sparse_path))
    whole = assemble(sparse_path / "image")
    with mounted_image(whole, sparse_path / "mount") as mount:
        first, second, third = (mount / "layers" / x["name"] for x in report["layers"])
        base = {"etc/one", "etc/two", "opt/old", "large"}
        upper = {"etc/two", "opt/new", "large", "large-too"}
        assert names_in(first) == base
        assert names_in(second) == upper
        assert names_in(third) == names_in(mount / "rootfs") == upper | {"last"}
        assert (first / "etc/two").read_bytes() == b"2"
        assert (second / "etc/two").read_bytes() == b"2"
        assert (third / "etc/two").read_bytes() == b"two"
        for tree in (first, second, third):
            assert (tree / "large").read_bytes() == b"large" * 100000
            assert stat.S_IMODE((tree / "etc").stat().st_mode) == 0o755
        # Inode numbers stay over the layers.
        assert (first / "large").stat().st_ino == (third / "large").stat().st_ino
