"""Images with trees that tests fork, change and commit."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.adversarial_tree import GRANTING_ACL
from support.needs import Need
from support.volume_support import NAME, Place, image_place

from btrfs_ublk import server as servers
from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume import FORK_MODES, ForkMode, fork_image, up_volume
from btrfs_ublk.volume.device import find_device
from btrfs_ublk.volume.store import volume_directory

CHANGED_BIG = random.Random(9).randbytes(4 * MIB)


def base_tree(root: Path) -> Path:
    """What the image has before anything changes."""
    tree = root / "tree"
    for name in ("etc/apt", "usr/lib/deep/er", "moved/inner", "replaced", "var"):
        (tree / name).mkdir(parents=True)
    (tree / "big").write_bytes(CHANGED_BIG)
    for name in ("etc/motd", "etc/gone", "usr/lib/deep/er/x", "moved/inner/y"):
        (tree / name).write_text(f"{name}\n")
    for name in ("replaced/old", "var/to-directory", "etc/apt/list", "etc/mode"):
        (tree / name).write_text(f"{name}\n")
    (tree / "linked").write_text("two names\n")
    os.link(tree / "linked", tree / "etc/linked-too")
    os.link(tree / "linked", tree / "third")
    (tree / "link").symlink_to("etc/motd")
    os.chown(tree / "etc", 7, 8)
    return tree


def change(one: Path, mode: ForkMode) -> None:
    """Change all that can be changed."""
    (one / "etc/motd").write_text("changed\n")
    (one / "etc/gone").unlink()
    (one / "new").mkdir(0o700)
    (one / "new/file").write_bytes(os.urandom(70 * KIB))
    os.link(one / "new/file", one / "usr/lib/second-name")
    os.setxattr(one / "new/file", "user.binary", bytes(range(256)))
    os.utime(one / "new/file", ns=(0, -1_250_000_000))
    os.mkfifo(one / "new/fifo")
    os.mknod(one / "new/device", 0o20640, os.makedev(5, 300))
    (one / "new/dangling").symlink_to("a" * 200)
    (one / os.fsdecode(b"new/\xff\xfe" + b"n" * 200)).write_text("not UTF-8")
    if mode == "snapshot":
        os.rename(one / "moved", one / "usr/moved-here")
    else:  # overlayfs answers EXDEV, and mv copies
        shutil.move(one / "moved", one / "usr/moved-here")
    (one / "usr/moved-here/inner/y").write_text("changed after the move\n")
    shutil.rmtree(one / "replaced")
    (one / "replaced").mkdir()
    (one / "replaced/new").write_text("another directory\n")
    (one / "var/to-directory").unlink()
    (one / "var/to-directory").mkdir()
    (one / "var/to-directory/x").write_text("x")
    shutil.rmtree(one / "etc/apt")
    (one / "etc/apt").write_text("a file now\n")
    (one / "etc/mode").chmod(0o4755)
    os.chown(one / "usr/lib", 1000, 3_000_000)
    os.rename(one / "linked", one / "linked-elsewhere")
    with open(one / "third", "a") as file:
        file.write("more\n")
    (one / "link").unlink()
    (one / "link").symlink_to("etc/mode")
    os.chmod(one, 0o711)


BIG = random.Random(7).randbytes(8 * MIB)

SMALL_FILES = 40

each_mode = pytest.mark.parametrize("mode", FORK_MODES)


@pytest.fixture
def place(
    need: Need,
    sparse_path: Path,
    front_end: FrontEndName,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    """An image that is up. Its files would be fetched from a layout."""
    need(ROOT, BTRFS, LOOP)
    found = image_place(sparse_path, monkeypatch, front_end)
    tree = sparse_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "big").write_bytes(BIG)
    (tree / "etc/motd").write_text("hello\n")
    for number in range(SMALL_FILES):
        (tree / f"etc/{number}").write_text(str(number))
    os.chown(tree, 3, 4)
    tree.chmod(0o2750)
    os.setxattr(tree, "user.of", b"top")
    os.setxattr(tree, "system.posix_acl_default", GRANTING_ACL)
    image = build_image(
        tree, sparse_path / "layout", BuildOptions(compression="none"), tag="app"
    )
    up(found, str(image.name))
    yield found
    found.take_all_down()


def up(place: Place, image: str | None = None) -> None:
    if image is None:
        image = volume_directory(NAME, place.base).definition().image
    up_volume(NAME, place.definition(image=image), base=place.base)


def fork(
    place: Place, name: str, mode: ForkMode, quota_bytes: int | None = None
) -> Path:
    return fork_image(NAME, name, mode=mode, quota_bytes=quota_bytes, base=place.base)


def fetched_bytes(place: Place) -> int:
    device = find_device(volume_directory(NAME, place.base), ask=True)
    assert device is not None and device.stats is not None
    stats = servers.ServerStats.parse(device.stats)
    return sum(lazy.fetcher.bytes_fetched for lazy in stats.lazy)
