"""``btrfs-ublk image export``: the tar has what the source had, or there is none."""

import json
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support import trees
from support.images import Editor, LeafItem, assemble, mkimage
from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.trees import describe, differences, tree_of

from btrfs_ublk.base.helpers import READIMAGE
from btrfs_ublk.cli.image import command
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.documents import InvalidImageError
from btrfs_ublk.image.pull import open_sealed
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.units import KIB, MIB

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("temporary")]

TIMEOUT_S = 300
SUBVOLUME = 256
INODE_ITEM, INODE_REF, DIR_INDEX, EXTENT_DATA = 1, 12, 96, 108
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes such trees")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory that takes attributes of any size, which not every disk's does."""
    path = Path(tempfile.mkdtemp(prefix="btrfs-ublk-tests-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def export(*words: object) -> bytes:
    """The tar that the command prints."""
    argv = ["export", *map(str, words)]
    runner = CliRunner()
    result = runner.invoke(command, argv, standalone_mode=False, catch_exceptions=False)
    return result.stdout_bytes


def exported(image: LayoutName, path: Path, *words: object) -> Path:
    assert export(image, "-o", path, *words) == b""
    return path


def model_of(build: Path, tar: Path) -> dict[str, Any]:
    """What the sources of images read in a tar."""
    done = subprocess.run(
        [build / "csrc/tests/image-shell", f"tar:{tar}"],
        capture_output=True,
        timeout=TIMEOUT_S,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr.decode()
    model: dict[str, Any] = json.loads(done.stdout)
    return model


def small_tree(path: Path) -> Path:
    (path / "below" / "deeper").mkdir(parents=True)
    content = random.Random(1).randbytes(300 * KIB)
    (path / "below" / "content").write_bytes(content + b"tail")
    (path / "inline").write_bytes(b"a few bytes")
    (path / "zeroes").write_bytes(bytes(200 * KIB))
    (path / "link").symlink_to("below/content")
    with (path / "sparse").open("wb") as file:
        file.seek(3 * MIB)
        file.write(b"in the middle")
        file.truncate(8 * MIB)
    os.link(path / "inline", path / "below" / "again")
    os.utime(path / "inline", ns=(1, 1_234_567_890_123_456_789))
    os.utime(path / "below" / "content", ns=(1, -1_250_000_000))
    (path / "below").chmod(0o750)
    return path


@pytest.fixture
def image(sparse_path: Path) -> LayoutName:
    tree = small_tree(sparse_path / "tree")
    return build_image(tree, sparse_path / "layout", BuildOptions(), tag="app").name


@as_root
@pytest.mark.usefixtures("sanitized_helpers")
def test_all_that_trees_can_have(
    sanitized_build: Path, sparse_path: Path, in_memory: Path
) -> None:
    tree = trees.make(in_memory / "tree", entries=300, links=100)
    (tree / "special" / "socket").unlink()  # which no tar has
    image = build_image(tree, sparse_path / "layout", BuildOptions(threads=2)).name
    tar = exported(image, sparse_path / "tar")
    source = describe(tree)
    assert differences(source, tree_of(model_of(sanitized_build, tar))) == []
    assert tar.stat().st_size < 16 * MIB  # though one file has 8 TiB

    # Other programs' eyes see the same.
    again = in_memory / "again"
    again.mkdir()
    extract = ["tar", "--extract", f"--file={tar}", f"--directory={again}"]
    extract += ["--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner"]
    extract += ["--same-owner", "--preserve-permissions"]
    subprocess.run(extract, check=True, timeout=TIMEOUT_S)
    assert differences(source, describe(again)) == []


def test_a_tar_comes_back(sanitized_build: Path, sparse_path: Path) -> None:
    """Whatever is chosen for the image, the tar has the same bytes."""
    tree = small_tree(sparse_path / "tree")
    tar = sparse_path / "source.tar"
    create = ["tar", "--create", "--format=pax", "--sparse", f"--file={tar}"]
    subprocess.run([*create, f"--directory={tree}", "."], check=True, timeout=TIMEOUT_S)
    tars = [
        exported(
            build_image(source, sparse_path / str(number), options).name,
            sparse_path / f"{number}.tar",
        )
        for number, (source, options) in enumerate(
            [
                (tar, BuildOptions()),
                (tar, BuildOptions(compression="none", max_inline=0, threads=1)),
                (sparse_path / "0.tar", BuildOptions()),
            ]
        )
    ]
    assert len({path.read_bytes() for path in tars}) == 1
    source, found = (tree_of(model_of(sanitized_build, x)) for x in (tar, tars[0]))
    assert differences(source, found) == []
    with tarfile.open(tars[0]) as file:
        names = file.getnames()
        sparse = file.extractfile("sparse")
        assert sparse is not None
        assert sparse.read() == (tree / "sparse").read_bytes()
    assert names == [
        *(".", "below", "below/again", "below/content", "below/deeper", "inline"),
        *("link", "sparse", "zeroes"),
    ]


def test_a_damaged_image_gives_no_tar(image: LayoutName, sparse_path: Path) -> None:
    layout, manifest, _ = open_sealed(image)
    assert manifest.data is not None
    with layout.blob(manifest.data.digest).open("r+b") as file:
        file.seek(5000)
        file.write(b"something else")
    path = sparse_path / "tar"
    with pytest.raises(InvalidImageError, match="unit 0 at offset 0: its digest is"):
        export(image, "-o", path)
    assert not path.exists()
    path.write_bytes(b"what was there before")
    with pytest.raises(InvalidImageError):
        export(image, "-o", path)
    assert path.read_bytes() == b"what was there before"


# ---- Trees that are not as they must be, with right checksums ----


class Hostile:
    """An image of a small tree, all in one leaf, and the helper that reads it."""

    def __init__(self, build: Path, path: Path) -> None:
        made = path / "made"
        source = {"kind": "directory", "path": small_tree(path / "tree")}
        mkimage(made, source, compression="none")
        self._helper = build / "csrc/tools" / READIMAGE
        self.image = assemble(made)

    def read(self) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self._helper, "tar", str(SUBVOLUME), self.image],
            capture_output=True,
            timeout=TIMEOUT_S,
            env=os.environ | SANITIZER_ENVIRONMENT,
        )

    def refusal(self) -> str:
        done = self.read()
        said = done.stderr.decode()
        assert done.returncode == 1 and said.startswith(f"{READIMAGE}: error: "), said
        return said.removeprefix(f"{READIMAGE}: error: ").strip()


@pytest.fixture
def hostile(sanitized_build: Path, sparse_path: Path) -> Hostile:
    return Hostile(sanitized_build, sparse_path)


def named(items: list[LeafItem], name: bytes) -> LeafItem:
    """The directory's item of a name."""
    (item,) = (x for x in items if x.key[1] == DIR_INDEX and bytes(x.data[30:]) == name)
    return item


def inode_of(items: list[LeafItem], name: bytes, kind: int) -> LeafItem:
    """The first item of a kind that the inode of a name has."""
    inode = named(items, name).get("Q", 0)
    return next(x for x in items if x.key[:2] == (inode, kind))


def change(
    name: bytes, kind: int, layout: str, at: int, value: int
) -> Callable[[list[LeafItem]], None]:
    """Change a number in the first item of a kind that the inode of a name has; or in
    that name's own item."""

    def damage(items: list[LeafItem]) -> None:
        one = named(items, name) if kind == DIR_INDEX else inode_of(items, name, kind)
        one.set(layout, at, value)

    return damage


def loop(items: list[LeafItem]) -> None:
    named(items, b"deeper").set("Q", 0, named(items, b"below").get("Q", 0))


def climb(items: list[LeafItem]) -> None:
    named(items, b"deeper").data[30:] = b"../etc"


def twice(items: list[LeafItem]) -> None:
    named(items, b"zeroes").data[30:] = b"sparse"


def no_data(items: list[LeafItem]) -> None:
    extent = inode_of(items, b"content", EXTENT_DATA)
    extent.set("Q", 21, extent.get("Q", 21) + (1 << 40))


def few_links(items: list[LeafItem]) -> None:
    named(items, b"link").set("Q", 0, named(items, b"inline").get("Q", 0))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (loop, '"below/deeper": '),
        (climb, '"below": '),
        (change(b"deeper", DIR_INDEX, "Q", 0, 256), '"below": '),
        (
            change(b"link", DIR_INDEX, "Q", 0, 9999),
            '"link": tree of subvolume 256: there is no item',
        ),
        (
            change(b"deeper", DIR_INDEX, "B", 8, 132),
            '"below": "deeper" in it is another subvolume',
        ),
        (twice, '"/": "sparse" is twice in it'),
        (change(b"link", INODE_ITEM, "I", 52, 0o150644), '"link": '),
        (change(b"zeroes", INODE_ITEM, "Q", 16, 1 << 63), '"zeroes": '),
        (no_data, '"below/content": logical address'),
        # Metadata as data, beyond its extent, zstd that is none, LZO.
        (change(b"content", EXTENT_DATA, "Q", 21, 65 * MIB), '"below/content": '),
        (change(b"content", EXTENT_DATA, "Q", 37, 1 << 40), '"below/content": '),
        (change(b"content", EXTENT_DATA, "B", 16, 3), '"below/content": '),
        (
            change(b"content", EXTENT_DATA, "B", 16, 2),
            '"below/content": its compression has the number 2',
        ),
        (change(b"inline", EXTENT_DATA, "Q", 8, 1 << 20), '"below/again": '),
        (few_links, '"link": inode'),
    ],
)
def test_hostile_trees(hostile: Hostile, damage: Any, said: str) -> None:
    with Editor(hostile.image) as editor, editor.items(SUBVOLUME) as items:
        damage(items)
    assert hostile.refusal().startswith(said)


def test_a_tar_that_cannot_be_written(hostile: Hostile, sanitized_build: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sanitized_build / "csrc/tools" / READIMAGE, "tar", "256", hostile.image],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            text=True,
        )
    assert done.returncode == 1
    assert "cannot write the tar: No space left on device" in done.stderr
