"""Trees of a volume that are listed elsewhere: made once and whole, or not at all."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.volumes import NAME, Place, killed_at
from support.web_servers import ScriptedServer, ranged, response, scripted_server

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import delete_subvolumes
from btrfs_ublk.volume import VolumeTree, down_volume, up_volume
from btrfs_ublk.volume.store import volume_directory

pytestmark = [pytest.mark.data, pytest.mark.fuse, pytest.mark.usefixtures("in_process")]

DATA = {"x": b"hello\n" * 1000, "d/y": b"y" * 5000, "d/z": b""}


class Site(dict[str, bytes]):
    """Files by path, served by ranges; and the index of each directory, in JSON without
    sizes."""

    def __call__(self, head: str) -> bytes:
        path = head.split(" ")[1].removeprefix("/")
        if path and not path.endswith("/"):
            if not (data := self[path]):
                return response("416 No\nContent-Range: bytes */0")
            tag = hashlib.sha256(data).hexdigest()
            return ranged(head, data, f'ETag: "{tag}"')
        below = [
            x.removeprefix(path).partition("/") for x in self if x.startswith(path)
        ]
        if not below:
            return response("404 No")
        entries = [{"name": name, "is_dir": bool(slash)} for name, slash, _ in below]
        kind = "Content-Type: application/json"
        return response(f"200 OK\n{kind}", json.dumps(entries).encode())


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(Site(DATA)) as running:
        yield running


def contents(top: Path) -> dict[str, bytes]:
    return {
        str(x.relative_to(top)): x.read_bytes() for x in top.rglob("*") if x.is_file()
    }


def up(place: Place, *trees: VolumeTree) -> None:
    up_volume(NAME, place.definition(trees=trees), base=place.base)


def test_a_tree_is_made_once(place: Place, server: ScriptedServer) -> None:
    up(place)
    url = server.url("")
    done = place.command("up", NAME, "--add-tree", f"some/tree={url}")
    assert done.returncode == 0, done.stderr
    tree = place.target / "some/tree"
    assert contents(tree) == DATA
    status = place.command("status", NAME).stdout
    assert f"some/tree: 3 files, 10.74 KiB from {url}" in status
    asked = len(server.requests)
    with (tree / "x").open("r+b") as file:
        file.write(b"mine")
    (tree / "new").write_bytes(b"new")
    for _ in range(2):
        assert place.command("up", NAME).returncode == 0
        assert (tree / "x").read_bytes()[:4] == b"mine"
        down_volume(NAME, base=place.base)
    assert place.command("up", NAME).returncode == 0
    delete_subvolumes(tree)
    assert place.command("up", NAME).returncode == 0
    assert not tree.exists() and len(server.requests) == asked
    other = place.command("up", NAME, "--add-tree", "some/tree=s3://b/")
    assert other.returncode == 2 and "has two sources" in other.stderr
    below = place.command("up", NAME, "--add-file", f"some/tree/x={server.url('x')}")
    assert below.returncode == 2 and "cannot be in 'some/tree', a tree" in below.stderr


def test_nothing_is_left_of_trees_that_cannot_be(
    place: Place, server: ScriptedServer
) -> None:
    whole = VolumeTree.parse(f"a/whole={server.url('')}")
    bad = VolumeTree("bad", whole.source | {"unit": 5000})
    with pytest.raises(UsageError, match="unit"):
        up(place, whole, bad)
    assert not list(place.base.glob("[!.]*"))
    up(place)
    kept = volume_directory(NAME, place.base)
    missing = VolumeTree.parse(f"m={server.url('missing/')}")
    for wrong, why in ((bad, "unit"), (missing, "HTTP 404")):
        with pytest.raises(BtrfsUblkError, match=why):
            up(place, whole, wrong)
        assert not os.listdir(place.target) and kept.half_tree() is None
        assert kept.made_trees() == [] and kept.definition().trees == ()
    (place.target / "whole").touch()
    with pytest.raises(UsageError, match="there is a 'whole'"):
        up(place, VolumeTree.parse(f"whole={server.url('')}"))


def test_the_listed_object_and_no_other(place: Place, server: ScriptedServer) -> None:
    """By the ETag of when it was listed."""
    site = Site({"y": b"y" * 5000})
    server.script = site
    tree = VolumeTree.parse(f"t={server.url('')}")
    up(place, tree)
    site["y"] = b"z" * 5000
    with pytest.raises(OSError, match="Input/output error"):
        (place.target / "t/y").read_bytes()
    up(place, tree, VolumeTree("u", tree.source))
    assert (place.target / "u/y").read_bytes() == b"z" * 5000
    with pytest.raises(OSError, match="Input/output error"):
        (place.target / "t/y").read_bytes()


#: Where an addition is killed.
STEPS = (
    "make_clones",
    "commit_transaction",
    "VolumeDirectory.write_made_trees",
    "rename_beneath",
    "VolumeDirectory.forget_half_tree",
)


def test_killed_in_between(place: Place, server: ScriptedServer) -> None:
    up(place)
    for number, step in enumerate(STEPS):
        tree = f"t{number}={server.url('')}"
        defined = f"volume.find_definition('{NAME}', base={place.base!r}).definition"
        trees = f"[volume.VolumeTree.parse('{tree}')]"
        killed_at(
            f"volume.trees:{step}",
            f"volume.up_volume('{NAME}', {defined}.with_trees({trees}),"
            f" base={place.base!r})",
        )
        done = place.command("up", NAME, "--add-tree", tree)
        assert done.returncode == 0, (step, done.stderr)
        assert contents(place.target / f"t{number}") == DATA
        kept = volume_directory(NAME, place.base)
        assert kept.half_tree() is None
        assert [x.path for x in kept.made_trees()] == [
            f"t{x}" for x in range(number + 1)
        ]
    assert len(os.listdir(place.target)) == len(STEPS)
