"""Sealed images: what was put in is what the kernel shows, and checkers are content."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import trees
from support.images import (
    KIB,
    TIMEOUT_S,
    as_root,
    assemble,
    btrfs_check,
    content,
    directory,
    layer,
    mkimage,
    mkimage_raw,
    small_tree,
)

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.base.helpers import MKIMAGE, helper_path


@as_root
def test_two_builds_are_equal_whatever_the_threads(sparse_path: Path) -> None:
    tree = trees.make(sparse_path / "tree")
    small_tree(tree / "small")
    reports = []
    for name, threads in (("one", 1), ("two", 2), ("eight", 8)):
        reports.append(mkimage(sparse_path / name, directory(tree), threads=threads))
    assert reports[0] == reports[1] == reports[2]
    for name in ("data", "digests"):
        first = (sparse_path / "one" / name).read_bytes()
        assert (sparse_path / "two" / name).read_bytes() == first
        assert (sparse_path / "eight" / name).read_bytes() == first
    first_seed = content(sparse_path / "one/seed.img")
    assert content(sparse_path / "two/seed.img") == first_seed
    assert content(sparse_path / "eight/seed.img") == first_seed


def test_one_content_is_used_by_very_many_files(
    sparse_path: Path, need: Callable[..., None]
) -> None:
    """More references than an extent's item has room for, and than one extent gets."""
    need(BTRFS_PROGS)
    tree = sparse_path / "tree"
    tree.mkdir()
    for number in range(1500):
        (tree / f"{number}").write_bytes(b"the same" * 1000)
    report = mkimage(sparse_path / "image", directory(tree), compression="none")
    assert report["counts"]["extents"] == 2
    btrfs_check(assemble(sparse_path / "image"))


def test_an_image_may_have_many_layers(
    sparse_path: Path, need: Callable[..., None]
) -> None:
    """More than a node of the tree of roots, and more references than an item holds, to
    data and to blocks of trees, which layers share."""
    need(BTRFS_PROGS)
    first = [(f"d{n % 50}/{n}", b"%d" % n * 99) for n in range(1500)]
    layers = [layer(sparse_path / "0", *first, ("shared", b"shared" * 10000))]
    for number in range(1, 120):
        changed = [(f"d{number % 50}/{n}-{number}", b"x" * n) for n in range(9)]
        removed = (f"d{number % 7}/.wh.{number * 9}", b"")
        layers.append(layer(sparse_path / f"{number}", *changed, removed))
    alone = mkimage(sparse_path / "one", layers[0])["metadata_bytes"]
    image = sparse_path / "image"
    report = mkimage(image, *layers)
    # Each of the others has changed a few leaves, and has a root.
    assert report["metadata_bytes"] < alone + 119 * 15 * 16384
    btrfs_check(assemble(image))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": []}, '"layers"'),
        ({"compression": "gzip"}, "gzip"),
        ({"compression": "zstd:99"}, "zstd:99"),
        ({"max_inline": 4096}, '"max_inline" is 4096'),
        ({"unit": 5000}, '"unit" is 5000'),
        ({"threads": 0}, '"threads" is 0'),
        ({"checksum": "md5"}, "md5"),
        ({"label": "two\nlines"}, '"label"'),
        ({"colour": "red"}, "colour"),
        ({"layers": [{"kind": "zip", "path": "/"}]}, "zip"),
        ({"layers": [{"kind": "tar", "path": "/", "name": "a/b"}]}, "a/b"),
        ({"layers": [{"kind": "tar", "path": "/", "diff_id": "sha256:1"}]}, "sha256:1"),
        ("{", "the description: "),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    (tmp_path / "image").mkdir()
    description: dict[str, Any] = {
        "layers": [{"kind": "directory", "path": str(tmp_path)}],
        "output": str(tmp_path / "image"),
    }
    done = mkimage_raw(change if isinstance(change, str) else description | change)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("btrfs-ublk-mkimage: error: ") and said in done.stderr
    assert list((tmp_path / "image").iterdir()) == []


def test_a_directory_with_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"")
    tree = {"kind": "directory", "path": str(tmp_path)}
    done = mkimage_raw({"layers": [tree], "output": str(tmp_path)})
    assert done.returncode == 1 and "is not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@as_root
def test_what_btrfs_cannot_hold_is_named(sparse_path: Path) -> None:
    tree, output = sparse_path / "tree", sparse_path / "image"
    tree.mkdir()
    output.mkdir()
    (tree / "file").touch()
    os.setxattr(tree / "file", "trusted.large", bytes(20000))
    entry = {"kind": "directory", "path": str(tree)}
    done = mkimage_raw({"layers": [entry], "output": str(output)})
    assert done.returncode == 1 and "file: btrfs cannot hold it" in done.stderr
    assert list(output.iterdir()) == []


def _truncate(file: Path) -> None:
    os.truncate(file, 5 * KIB)


def _grow(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


def _overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(b"other")


def _replace(file: Path) -> None:
    file.with_name("link").symlink_to("/etc/passwd")
    file.with_name("link").rename(file)


def _move(file: Path) -> None:
    file.parent.rename(file.parents[2] / "elsewhere")


def _has_open(pid: int, file: Path) -> bool:
    wanted = file.stat()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed since
            if os.path.samestat(descriptor.stat(), wanted):
                return True
    return False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_truncate, '"below/file": it became shorter while it was read'),
        (_grow, '"below/file": it was changed while it was read'),
        (_overwrite, '"below/file": it was changed while it was read'),
        (_replace, None),
        (_move, "a directory in it was moved while it was read"),
    ],
)
def test_a_tree_that_changes_while_it_is_read(
    sparse_path: Path, change: Callable[[Path], None], said: str | None
) -> None:
    """The image has a file as it was when it was opened, or there is none."""
    file, output = sparse_path / "tree/below/file", sparse_path / "image"
    file.parent.mkdir(parents=True)
    file.write_bytes(random.Random(1).randbytes(2048 * KIB) * 2)
    (sparse_path / "tree/next").touch()
    output.mkdir()
    layers = [directory(sparse_path / "tree") | {"path": str(sparse_path / "tree")}]
    description = {"layers": layers, "output": str(output), "compression": "zstd:15"}
    with subprocess.Popen(
        [helper_path(MKIMAGE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        child.stdin.write(json.dumps(description))
        child.stdin.close()
        child.stdin = None
        while not _has_open(child.pid, file):
            assert child.poll() is None
        child.send_signal(signal.SIGSTOP)
        change(file)
        child.send_signal(signal.SIGCONT)
        _, words = child.communicate(timeout=TIMEOUT_S)
    if said is None:
        assert child.returncode == 0, words
    else:
        assert child.returncode == 1 and said in words
        assert list(output.iterdir()) == []
