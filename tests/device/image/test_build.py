"""Sealed images: what was put in is what the kernel shows, and checkers are content."""

import os
import random
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
    layer,
    mkimage,
    mounted_image,
    small_tree,
    three_layers,
)
from support.trees import describe, differences

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.base.process import run
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.units import GIB


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


def files_in(top: Path) -> dict[str, bytes]:
    return {name: (top / name).read_bytes() for name in names_in(top)}


@pytest.mark.data
def test_blocks_that_layers_share_are_those_of_snapshots(
    sparse_path: Path, need: Callable[..., None]
) -> None:
    """The kernel changes snapshots of layers, and deletes layers, the owners of blocks
    first, while those above keep what they share; so it does when the seed goes."""
    need(BTRFS_PROGS)
    some = random.Random(7)
    first = [(f"d{n % 40}/{n}", some.randbytes(n % 5000)) for n in range(1500)]
    layers = [layer(sparse_path / "0", *first)]
    for number in range(1, 6):
        new = [(f"d{n}/{n}-{number}", some.randbytes(900 * n)) for n in range(9)]
        changed = [(f"d{n % 40}/{n}", b"%d" % number) for n in range(number, 1500, 99)]
        gone = (f"d{number}/.wh.{number + 40}", b"")
        layers.append(layer(sparse_path / f"{number}", *new, *changed, gone))
    report = mkimage(sparse_path / "image", *layers)
    mount, writable = sparse_path / "mount", sparse_path / "writable"
    mount.mkdir()
    with writable.open("wb") as file:
        file.truncate(GIB)

    def btrfs(*words: object) -> None:
        run(["btrfs", *map(str, words)], timeout_s=300)

    whole = assemble(sparse_path / "image")
    with loop_device(whole, read_only=True) as seed, loop_device(writable) as own:
        with mounted(seed.path, mount, read_only=True):
            btrfs("device", "add", "--nodiscard", own.path, mount)
            run(["mount", "-o", "remount,rw", mount], timeout_s=60)
            trees = [mount / "layers" / each["name"] for each in report["layers"]]
            before = {tree: files_in(tree) for tree in trees}
            counts = [len(files) for files in before.values()]
            assert counts == [1500, 1508, 1516, 1524, 1532, 1540]
            for number, tree in enumerate(trees):
                fork = mount / f"fork{number}" if number < 5 else tree
                if fork == tree:  # the kernel was told of no snapshot of it
                    btrfs("property", "set", tree, "ro", "false")
                else:
                    btrfs("subvolume", "snapshot", tree, fork)
                for name in some.sample(sorted(before[tree]), 200):
                    (fork / name).unlink()
                for name in sorted(names_in(fork))[::9]:
                    (fork / name).write_bytes(b"changed")
                before[fork] = files_in(fork)
            for tree in (trees[0], trees[2], trees[4], mount / "fork1"):
                btrfs("subvolume", "delete", "--commit-each", tree)
                del before[tree]
            btrfs("subvolume", "sync", mount)
            for there in (False, True):
                if there:
                    btrfs("device", "remove", seed.path, mount)
                assert {tree: files_in(tree) for tree in before} == before
        for mode in ("original", "lowmem"):
            btrfs("check", "--readonly", f"--mode={mode}", own.path)
