"""``btrfs-ublk image diff``: what differs between two trees, and nothing else."""

import json
import os
import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from btrfs_ublk.base.process import CommandError
from btrfs_ublk.cli.image import command
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.documents import InvalidImageError
from btrfs_ublk.image.pull import open_sealed
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.units import KIB

pytestmark = pytest.mark.usefixtures("sanitized_helpers", "temporary")
UNIT = 64 * KIB
SECONDS = 1_500_000_000


@dataclass(frozen=True)
class Compared:
    status: int
    lines: list[str]
    remark: str


def run(*words: object) -> Any:
    argv = ["diff", *map(str, words)]
    runner = CliRunner()
    return runner.invoke(command, argv, standalone_mode=False, catch_exceptions=False)


def diff(*words: object) -> Compared:
    result = run(*words)
    return Compared(result.return_value, result.stdout.splitlines(), result.stderr)


def tree(path: Path) -> Path:
    (path / "below").mkdir(parents=True)
    content = random.Random(1).randbytes(4 * UNIT)
    (path / "below" / "content").write_bytes(content)
    (path / "below-it").write_bytes(b"sorts behind what is in below")
    (path / "inline").write_bytes(b"a few bytes")
    (path / "zeroes").write_bytes(bytes(200 * KIB))
    (path / "link").symlink_to("below/content")
    (path / "-").touch()
    os.link(path / "inline", path / "other-name")
    settle(path)
    return path


def settle(path: Path) -> None:
    """Give all the same time."""
    for each in (path, *path.rglob("*")):
        os.utime(each, (SECONDS, SECONDS), follow_symlinks=False)


def sealed(source: Path, layout: Path, **options: Any) -> LayoutName:
    return build_image(source, layout, BuildOptions(unit_bytes=UNIT, **options)).name


@pytest.fixture
def first(sparse_path: Path) -> Path:
    return tree(sparse_path / "first")


@pytest.fixture
def second(sparse_path: Path, first: Path) -> Path:
    second = sparse_path / "second"
    shutil.copytree(first, second, symlinks=True)
    (second / "other-name").unlink()
    os.link(second / "inline", second / "other-name")
    settle(second)
    return second


def test_equal_trees(sparse_path: Path, first: Path, second: Path) -> None:
    """However they were packed, and with or without a hole."""
    (second / "zeroes").unlink()
    with (second / "zeroes").open("wb") as file:
        file.truncate(200 * KIB)
    settle(second)
    image = sealed(first, sparse_path / "one")
    other = sealed(second, sparse_path / "other", compression="none", max_inline=0)
    tar = sparse_path / "tar"
    create = ["tar", "--create", "--format=pax", f"--file={tar}"]
    subprocess.run([*create, f"--directory={first}", "."], check=True, timeout=60)
    for pair in ((image, image), (image, other), (image, second), (tar, other)):
        done = diff(*pair)
        assert (done.status, done.lines) == (0, []), pair
    same = json.loads(run(image, image, "--json").stdout)
    assert same["differences"] == [] and same["new_bytes"] == 0


def test_all_that_can_differ(sparse_path: Path, first: Path, second: Path) -> None:
    (second / "below" / "content").chmod(0o4755)
    (second / "below-it").write_bytes(b"sorts behind what is in BELOW")
    (second / "inline").write_bytes(b"some more bytes")  # and so has its other name
    (second / "link").unlink()
    (second / "link").symlink_to("elsewhere")
    os.mkdir(os.fsencode(second / "zero") + b"\xff")
    (second / "-").unlink()
    (second / "zeroes").unlink()
    (second / "zeroes").mkdir()
    (second / "zeroes" / "new\nline").touch()
    settle(second)
    os.utime(second / "below", (SECONDS, SECONDS + 1))
    images = [sealed(x, sparse_path / f"{x.name}-image") for x in (first, second)]
    mode = (first / "below" / "content").stat().st_mode & 0o7777
    expected = [
        "removed /-",
        "changed /below: time",
        f"changed /below/content: mode {mode:04o} -> 4755",
        "changed /below-it: content",
        "changed /inline: size 11 -> 15, content",
        "changed /link: size 13 -> 9, target below/content -> elsewhere",
        "changed /other-name: size 11 -> 15",
        "changed /zeroes: type file -> directory",
        r"added /zeroes/new\nline",
        r"added /zero\xff",
    ]
    for pair in (images, (first, second), (images[0], second)):
        done = diff(*pair)
        assert (done.status, done.lines) == (1, expected), pair
    assert diff(*reversed(images)).lines[-1] == r"removed /zero\xff"


def test_what_cannot_be_compared(sparse_path: Path, first: Path) -> None:
    image = sealed(first, sparse_path / "image")
    with pytest.raises(UsageError, match="there is no /none"):
        run(image, "/none")
    (sparse_path / "no-tar").write_bytes(b"this is no tar" * 100)
    with pytest.raises(BtrfsUblkError, match="damaged") as refused:
        run(image, sparse_path / "no-tar")
    assert isinstance(refused.value, UsageError | CommandError)
    layout, manifest, _ = open_sealed(image)
    assert manifest.data is not None
    os.truncate(layout.blob(manifest.data.digest), UNIT)
    with pytest.raises(InvalidImageError, match=f"{image}: "):
        run(first, image)
