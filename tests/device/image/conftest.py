"""An image of a small tree, made once for the tests of a file, and volumes of it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.trees import GRANTING_ACL
from support.volumes import BIG, NAME, SMALL_FILES, Place, image_place, up

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, UBLK
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.volume import forks_of_image, unfork_image


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("fuse", marks=pytest.mark.fuse),
        pytest.param("ublk", marks=pytest.mark.ublk),
    ],
)
def front_end(request: pytest.FixtureRequest, need: Need) -> FrontEndName:
    """As for all tests, but of a file: what is up may be for several of its tests."""
    name: FrontEndName = request.param
    need(ROOT, BTRFS, LOOP, UBLK if name == "ublk" else FUSE)
    return name


@pytest.fixture(scope="module")
def layout(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layout of the image ``app``."""
    need(ROOT, BTRFS, LOOP)
    root = tmp_path_factory.mktemp("image")
    tree = root / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "big").write_bytes(BIG)
    (tree / "etc/motd").write_text("hello\n")
    (tree / "srv/data").mkdir(parents=True)
    (tree / "srv/data/old").touch()
    (tree / "alias").symlink_to("/etc")
    for number in range(SMALL_FILES):
        (tree / f"etc/{number}").write_text(str(number))
    os.chown(tree, 3, 4)
    tree.chmod(0o2750)
    os.setxattr(tree, "user.of", b"top")
    os.setxattr(tree, "system.posix_acl_default", GRANTING_ACL)
    options = BuildOptions(compression="none")
    return build_image(tree, root / "layout", options, tag="app").name.path


@pytest.fixture
def place(
    layout: Path,
    front_end: FrontEndName,
    sparse_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    """A volume of the image that is up. Its files would be fetched from a layout."""
    found = image_place(sparse_path, monkeypatch, front_end)
    shutil.copytree(layout, sparse_path / "layout")
    up(found, f"oci:{sparse_path}/layout:app")
    yield found
    found.take_all_down()


@pytest.fixture(scope="module")
def kept_place(layout: Path, front_end: FrontEndName) -> Iterator[Place]:
    """One for all tests of a file, which do not take it down."""
    with pytest.MonkeyPatch.context() as patch:
        found = image_place(layout.parent, patch, front_end)
        up(found, f"oci:{layout}:app")
        yield found
        found.take_all_down()
        shutil.rmtree(found.base)


@pytest.fixture
def shared(kept_place: Place) -> Iterator[Place]:
    """The same, without forks and files of the tests before.

    NB: two volumes of one image cannot be up. Tests with one of their own come first.
    """
    before = set(os.listdir(kept_place.root))
    yield kept_place
    for each in forks_of_image(NAME, base=kept_place.base):
        unfork_image(NAME, each.name, base=kept_place.base)
    for name in set(os.listdir(kept_place.root)) - before:
        path = kept_place.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
