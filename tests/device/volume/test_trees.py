"""Whole trees in volumes of virtual data: equal to their sources, without moving data;
killed and failed additions leave nothing."""

import os
import random
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import new_btrfs
from support.images import mkimage
from support.needs import Need
from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.trees import GRANTING_ACL, describe, differences, make
from support.volumes import (
    NAME,
    TIMEOUT_S,
    Place,
    fetched_bytes,
    image_place,
    killed_at,
)

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.base.helpers import READIMAGE
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.kernel.btrfs import (
    create_subvolume,
    delete_subvolumes,
    is_subvolume,
    set_read_only,
)
from btrfs_ublk.kernel.reflink import clone_range
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import add_image, add_tree, down_volume, trees, up_volume
from btrfs_ublk.volume.store import volume_directory

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("in_process")]

BIG = random.Random(11).randbytes(3 * MIB + 5)
NO_ACCESS = RegistryAccess()


def small_tree(top: Path) -> Path:
    (top / "etc").mkdir(parents=True)
    (top / "big").write_bytes(BIG)
    (top / "etc/again").write_bytes(BIG)
    (top / "etc/motd").write_text("hello\n")
    os.link(top / "big", top / "etc/linked")
    (top / "etc").chmod(0o2751)
    os.chown(top / "etc", 7, 8)
    return top


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """A volume of virtual data that is up."""
    need(ROOT, BTRFS, LOOP)
    found = image_place(sparse_path, monkeypatch)
    up_volume(NAME, found.definition(), base=found.base)
    yield found
    found.take_all_down()


def built(place: Place, tree: Path, *, compression: str = "none") -> LayoutName:
    options = BuildOptions(compression=compression)
    return build_image(tree, place.root / "layout", options, tag=compression[:4]).name


def add(place: Place, image: LayoutName, path: str | None = None) -> Path:
    return add_image(NAME, image, path, access=NO_ACCESS, base=place.base).path


def is_untouched(place: Place) -> bool:
    kept = volume_directory(NAME, place.base)
    return (
        os.listdir(place.target) == []
        and kept.half_tree() is None
        and not kept.trees.exists()
    )


@pytest.mark.fuse
def test_a_tree_with_all_that_is_rare_comes_back_without_a_fetch(place: Place) -> None:
    tree = make(place.root / "tree", links=300)
    image = built(place, tree)
    before = fetched_bytes(place)
    one, two = add(place, image, "some/where/one"), add(place, image)
    assert (one, two) == (place.target / "some/where/one", place.target / "none")
    assert is_subvolume(one) and is_subvolume(two)
    assert fetched_bytes(place) == before
    assert place.answer("status", NAME)["state"] == "up"
    # It lasts, and so do the clones.
    down_volume(NAME, base=place.base)
    up_volume(NAME, place.definition(), base=place.base)
    source = describe(tree)
    assert differences(source, describe(one)) == []
    assert differences(source, describe(two)) == []
    # Both share one mapping, and files can be written to.
    mappings = place.command("list", NAME, "--json", noun="map").stdout
    assert mappings.count('"source_offset"') == 1
    with (one / "contents/random").open("r+b") as file:
        file.write(b"changed")
    assert (two / "contents/random").read_bytes() == (
        tree / "contents/random"
    ).read_bytes()
    (one / "clone").touch()
    clone_range(one / "contents/size-131072", one / "clone")


@pytest.mark.fuse
def test_a_directory_and_a_tar_become_trees(place: Place) -> None:
    tree = small_tree(place.root / "tree")
    done = place.command("add-tree", NAME, tree, "a/directory")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{place.target}/a/directory\n"
    with tarfile.open(place.root / "tree.tar.gz", "w:gz") as tar:
        tar.add(tree, arcname=".")
    found = place.answer("add-tree", NAME, place.root / "tree.tar.gz", "tar")
    # The data are the same, and in one file.
    kept = volume_directory(NAME, place.base).trees
    assert [str(path) for path in kept.iterdir()] == [found["data"]]
    assert Path(found["data"]).stat().st_size < 2 * len(BIG)
    for path in ("a/directory", "tar"):
        lines = differences(describe(tree), describe(place.target / path))
        # This tar has no nanoseconds.
        assert not [x for x in lines if path != "tar" or "mtime" not in x]
    delete_subvolumes(place.target / "tar")
    assert (place.target / "a/directory/big").read_bytes() == BIG


@pytest.mark.fuse
def test_a_tree_inherits_nothing_from_where_it_is_put(place: Place) -> None:
    """Neither a default ACL, nor the group of a directory with the set-group-ID bit:
    they would grant access that the image denies."""
    team = place.target / "team"
    team.mkdir()
    os.chown(team, 5, 6)
    team.chmod(0o2770)
    os.setxattr(team, "system.posix_acl_default", GRANTING_ACL)
    tree = small_tree(place.root / "tree")
    (tree / "etc/secret").write_text("secret\n")
    (tree / "etc/secret").chmod(0o640)
    tree.chmod(0o750)
    one = add(place, built(place, tree), "team/one")
    assert differences(describe(tree), describe(one)) == []


@pytest.mark.fuse
def test_what_cannot_be_leaves_nothing(place: Place) -> None:
    tree = small_tree(place.root / "tree")
    (tree / "etc/again").write_bytes(b"compressible " * 10000)
    packed = place.command("add-image", NAME, built(place, tree, compression="zstd:3"))
    assert packed.returncode == 1
    assert "etc/again" in packed.stderr and "--compression none" in packed.stderr
    image = built(place, tree)
    for path, why in (
        ("../out", "not one in the volume"),
        ("/etc", "not one in the volume"),
        (".", "not one in the volume"),
    ):
        done = place.command("add-image", NAME, image, path)
        assert done.returncode == 2 and why in done.stderr, done.stderr
    assert is_untouched(place)
    elsewhere = place.root / "elsewhere"
    elsewhere.mkdir()
    (place.target / "link").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="symbolic link"):
        add(place, image, "link/tree")
    with pytest.raises(UsageError, match="symbolic link"):
        add_tree(NAME, tree, "link/tree", access=NO_ACCESS, base=place.base)
    (place.target / "file").touch()
    for path in ("link", "file"):
        with pytest.raises(UsageError, match=f"there is a '{path}'"):
            add(place, image, path)
    with pytest.raises(UsageError, match="has no layer sha256:1"):
        add_image(NAME, image, "x", layer="sha256:1", access=NO_ACCESS, base=place.base)
    assert list(elsewhere.iterdir()) == []
    for name in ("link", "file"):
        (place.target / name).unlink()
    down_volume(NAME, base=place.base)
    with pytest.raises(UsageError, match="is down"):
        add(place, image, "x")


@pytest.mark.thorough
@pytest.mark.fuse
def test_a_volume_without_room_keeps_nothing(place: Place) -> None:
    full = place.root / "full"
    full.mkdir()
    for number in range(20_000):
        (full / f"{number}").write_bytes(bytes(2000))
    image = built(place, full)
    filler = place.target / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", 0) as file:
        while True:
            file.write(bytes(8 * MIB))
            os.fsync(file.fileno())
    with pytest.raises(BtrfsUblkError, match="No space left") as caught:
        add(place, image, "full")
    assert caught.value.hint and "volume resize" in caught.value.hint
    filler.unlink()
    assert is_untouched(place)


def killed(place: Place, step: str, tree: Path) -> None:
    """Add a tree, and be killed when it calls a function."""
    words = f"'{NAME}', {tree!r}, 'some/where', base={place.base!r}"
    killed_at(
        f"volume.trees:{step}",
        "from btrfs_ublk.image.access import RegistryAccess\n"
        f"volume.add_tree({words}, access=RegistryAccess())",
    )


#: Where it is killed, or in the middle of the work.
STEPS = (
    "VolumeDirectory.write_half_tree",
    "create_subvolume",
    "add_attributes",
    "_map",
    "Task.advance",
    "commit_transaction",
    "rename_beneath",
    "VolumeDirectory.forget_half_tree",
)


@pytest.mark.fuse
@pytest.mark.parametrize(
    "steps",
    [STEPS[1::3], pytest.param(STEPS, marks=pytest.mark.thorough)],
    ids=["some", "all"],
)
def test_killed_in_between(place: Place, steps: tuple[str, ...]) -> None:
    tree = small_tree(place.root / "tree")
    for number in range(5_000):
        (tree / f"{number}").touch()
    expected = describe(tree)
    for number, step in enumerate(steps):
        killed(place, step, tree)
        if number % 2 or step == "VolumeDirectory.forget_half_tree":
            up_volume(NAME, place.definition(), base=place.base)
        else:
            with pytest.raises(UsageError, match="not one in the volume"):
                add_tree(NAME, tree, "..", access=NO_ACCESS, base=place.base)
        done = place.command(noun="gc")
        assert done.returncode == 0, done.stderr
        if step != STEPS[-1]:
            assert os.listdir(place.target) == [], step
            assert volume_directory(NAME, place.base).half_tree() is None
            kept = volume_directory(NAME, place.base).trees
            assert not [x for x in kept.glob("*") if len(x.name) == 64], step
    assert differences(expected, describe(place.target / "some/where")) == []


@pytest.mark.fuse
@pytest.mark.parametrize("put", ["link", "directory"])
def test_nothing_else_becomes_the_new_subvolume(
    place: Place, monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    """The owner of the directory above may rename it away at once."""
    tree = small_tree(place.root / "tree")
    elsewhere = place.root / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    real = trees.create_subvolume

    def attacked(directory: Path, name: str) -> Path:
        made = real(directory, name)
        made.rename(directory / "away")
        if put == "link":
            made.symlink_to(elsewhere)
        else:
            made.mkdir(mode=0o755)
        return made

    monkeypatch.setattr(trees, "create_subvolume", attacked)
    expected = "symbolic link" if put == "link" else "is not the empty subvolume"
    with pytest.raises(BtrfsUblkError, match=expected):
        add_tree(NAME, tree, "tree", access=NO_ACCESS, base=place.base)
    assert elsewhere.stat().st_mode & 0o777 == 0o755
    assert os.listdir(elsewhere) == []
    assert volume_directory(NAME, place.base).half_tree() is None


@pytest.mark.fuse
def test_leftovers_go_wherever_their_directory_is(place: Place) -> None:
    tree = small_tree(place.root / "tree")
    (place.target / "some").mkdir()
    killed(place, "rename_beneath", tree)
    (left,) = (place.target / "some").iterdir()
    create_subvolume(left, "nested")
    set_read_only(left)
    moved = (place.target / "some").rename(place.target / "moved")
    (place.target / "some").symlink_to(moved)
    up_volume(NAME, place.definition(), base=place.base)
    assert list(moved.iterdir()) == []
    assert place.command(noun="gc").returncode == 0
    kept = volume_directory(NAME, place.base)
    assert kept.half_tree() is None
    assert not [x for x in kept.trees.glob("*") if len(x.name) == 64]


def test_the_helper_by_itself(
    need: Need, sanitized_build: Path, sparse_path: Path
) -> None:
    """Under sanitizers; and what a hostile image says of places is not believed."""
    need(ROOT, BTRFS, LOOP)
    tree = make(sparse_path / "tree", links=100)
    made = sparse_path / "image"
    layer = {"kind": "directory", "path": tree}
    report = mkimage(made, layer, compression="none")
    helper = sanitized_build / "csrc/tools" / READIMAGE
    words = [helper, "make", report["layers"][0]["subvolume"], made / "seed.img"]

    def run(*more: object, fds: tuple[int, ...] = ()) -> tuple[int, str, str]:
        done = subprocess.run(
            [str(word) for word in (*words, *more)],
            capture_output=True,
            text=True,
            pass_fds=fds,
            env=os.environ | SANITIZER_ENVIRONMENT,
            timeout=TIMEOUT_S,
        )
        return done.returncode, done.stdout, done.stderr

    data_bytes = report["data_bytes"]
    status, checked, said = run(data_bytes)
    assert (status, said) == (0, "")
    status, _, said = run(data_bytes - 4096)
    assert status == 1 and "an extent of it is not in the data" in said
    for wrong in ((), ("x",), (data_bytes, 1), (data_bytes, 1, 2, -3)):
        status, _, said = run(*wrong)
        assert status == 2 and "--help" in said
    with new_btrfs(sparse_path, size_bytes=256 * MIB) as mount:
        (mount / "data").write_bytes(bytes(MIB) + (made / "data").read_bytes())
        (mount / "tree").mkdir()
        fds = tuple(os.open(mount / x, os.O_RDONLY) for x in ("tree", "data"))
        try:
            status, out, said = run(data_bytes, *fds, MIB, fds=fds)
            assert (status, out, said) == (0, checked, "")
            assert differences(describe(tree), describe(mount / "tree")) == []
            status, _, said = run(data_bytes, *fds, MIB, fds=fds)
            assert status == 1 and "File exists" in said
        finally:
            for fd in fds:
                os.close(fd)
