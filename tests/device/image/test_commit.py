"""``btrfs-ublk image commit``: what others make of the image is what the fork shows."""

import gzip
import io
import json
import os
import shutil
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.images import LAYER, PLATFORM
from support.needs import Need
from support.registry import REGISTRY, registry_server
from support.volumes import (
    CHANGED_BIG,
    NAME,
    Place,
    base_tree,
    change,
    each_mode,
    fetched_bytes,
    fork,
)

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Program
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.commit import CommittedImage, Compression
from btrfs_ublk.image.documents import CONFIG, MANIFEST, digest_of, to_bytes
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.reference import LayoutName, Reference, parse_layout
from btrfs_ublk.image.transfer import open_repository, push_image
from btrfs_ublk.image.tree import Difference, diff_images
from btrfs_ublk.kernel.btrfs import create_snapshot, create_subvolume
from btrfs_ublk.volume import ForkMode
from btrfs_ublk.volume import commit as commit_module
from btrfs_ublk.volume import commit_fork, forks_of_image

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("in_process")]

SKOPEO = Program("skopeo", package="skopeo")
NO_ACCESS = RegistryAccess()


def ordinary_image(layout: Layout, tree: Path) -> None:
    """Have an image of two layers, the second of which removes something."""
    first = io.BytesIO()
    with tarfile.open(fileobj=first, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, ".")
    second = io.BytesIO()
    with tarfile.open(fileobj=second, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("usr/lib/deep/.wh.er"))
    tars = [each.getvalue() for each in (first, second)]
    about = {
        **PLATFORM,
        "rootfs": {"type": "layers", "diff_ids": [digest_of(x) for x in tars]},
        "history": [
            {"created_by": "one"},
            {"created_by": "env", "empty_layer": True},
            {"created_by": "two"},
            {"created_by": "cmd", "empty_layer": True},
        ],
        "config": {"Cmd": ["/bin/sh"]},
    }
    blobs = [layout.add(LAYER, gzip.compress(x, mtime=0)) for x in tars]
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": dict(layout.add(CONFIG, to_bytes(about)).raw),
        "layers": [dict(each.raw) for each in blobs],
    }
    layout.tag(layout.add(MANIFEST, to_bytes(document), platform=PLATFORM), "app")


@pytest.fixture(scope="module")
def layout(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layout of an image of two layers."""
    need(ROOT, BTRFS, LOOP)
    root = tmp_path_factory.mktemp("image")
    ordinary_image(Layout.made(root / "source"), base_tree(root))
    image = build_image(
        LayoutName(root / "source", "app"),
        root / "layout",
        BuildOptions(compression="none"),
        platform="linux/amd64",
    )
    return image.name.path


def commit(
    place: Place, name: str, path: str, compression: Compression = "gzip"
) -> CommittedImage:
    target = LayoutName(place.root / path, "made")
    return commit_fork(NAME, name, target, compression=compression, base=place.base)[0]


def differences(place: Place, image: str, tree: Path) -> list[Difference]:
    """What differs between a fork, and what the image becomes when it is sealed."""
    sealed = place.root / f"{Path(image).name.partition(':')[0]}-sealed"
    made = build_image(
        parse_layout(image), sealed, BuildOptions(), platform="linux/amd64"
    )
    found: list[Difference] = []
    diff_images(made.name, tree, NO_ACCESS, found.append)
    return found


def members(layout: Path, digest: str) -> list[tarfile.TarInfo]:
    data = Layout.opened(layout).blob(digest).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getmembers()


def test_in_a_registry_only_what_is_new_is_sent(place: Place, need: Need) -> None:
    need(REGISTRY)
    with registry_server(place.root, tls=True) as registry:
        access = RegistryAccess(ca_file=registry.ca_file)
        layout = Layout.opened(place.root / "layout")
        there = Reference(registry.host, "some/app", "1")
        with open_repository(there, access, writing=True) as repository:
            push_image(layout, layout.find("app"), there, repository)
        place.take_all_down()
        shutil.rmtree(place.base)
        (place.root / "etc").mkdir()
        (place.root / "etc/images.toml").write_text(
            f'[[allow]]\nfrom = "{there.place}"\n'
        )
        from btrfs_ublk.volume import up_volume

        definition = place.definition(image=str(there), image_ca_file=registry.ca_file)
        up_volume(NAME, definition, base=place.base)
        one = fork(place, "one", "snapshot")
        change(one, "snapshot")
        name = f"{registry.host}/another/app:2"
        words = ("commit", NAME, "one", "-t", name, "--json")
        done = place.command(*words, noun="image")
        assert done.returncode == 0, done.stderr
        target = Reference(registry.host, "another/app", "2")
        made = build_image(
            target,
            place.root / "another",
            BuildOptions(),
            platform="linux/amd64",
            access=access,
        )
        found: list[Difference] = []
        diff_images(made.name, one, NO_ACCESS, found.append)
        assert found == []
        with open_repository(target, access) as opened:
            document = json.loads(opened.document("2").data)
        new = (document["layers"][-1], document["config"])
        report = json.loads(done.stdout)
        assert report["sent_bytes"] == sum(each["size"] for each in new)


def test_data_that_cannot_be_read(place: Place) -> None:
    """Nothing is named, and nothing left."""
    one = fork(place, "one", "snapshot")
    (one / "big").chmod(0o600)
    for path in (place.root / "layout/blobs/sha256").iterdir():
        if path.stat().st_size >= len(CHANGED_BIG):
            path.chmod(0o600)
            os.truncate(path, 0)
    with pytest.raises(BtrfsUblkError, match="cannot read .*/big: Input/output error"):
        commit(place, "one", "out")
    assert not os.path.lexists(place.root / "out")
    assert os.listdir(place.target / "commits") == []


@each_mode
def test_the_image_is_what_the_fork_shows(shared: Place, mode: ForkMode) -> None:
    one = fork(shared, "one", mode)
    change(one, mode)
    image = commit(shared, "one", "out")
    assert differences(shared, image.name, one) == []
    again = commit(shared, "one", "again")
    assert again.digest == image.digest
    assert os.listdir(shared.target / "commits") == []


@each_mode
def test_no_data_of_the_image_are_read(shared: Place, mode: ForkMode) -> None:
    one = fork(shared, "one", mode)
    before = fetched_bytes(shared)
    image = commit(shared, "one", "as-it-was")
    found = members(shared.root / "as-it-was", image.layer)
    assert [each.name for each in found] == ["."]
    (one / "etc/new").write_text("new\n")
    (one / "etc/gone").unlink()
    (one / "etc/motd").write_text("changed\n")
    image = commit(shared, "one", "out")
    assert fetched_bytes(shared) == before
    names = [each.name for each in members(shared.root / "out", image.layer)]
    expected = [".", "etc", "etc/.wh.gone", "etc/motd", "etc/new"]
    assert [name for name in names if not name.startswith(("usr", "var"))] == expected


def test_a_fork_of_an_earlier_layer(shared: Place) -> None:
    from btrfs_ublk.volume import fork_image
    from btrfs_ublk.volume.store import volume_directory

    image = volume_directory(NAME, shared.base).made().image
    assert image is not None
    one = fork_image(NAME, "one", layer=image["layers"][0], base=shared.base)
    (one / "usr/lib/deep/er/new").write_text("new\n")
    made = commit(shared, "one", "out")
    assert differences(shared, made.name, one) == []
    layout = Layout.opened(shared.root / "out")
    document = json.loads(layout.read(layout.find("made")))
    assert len(document["layers"]) == 2
    assert all("annotations" not in each for each in document["layers"])
    config = json.loads(layout.blob(document["config"]["digest"]).read_bytes())
    words = [each["created_by"] for each in config["history"]]
    assert words == ["one", "env", "btrfs-ublk image commit"]
    assert config["config"] == {"Cmd": ["/bin/sh"]} and "created" not in config


def test_others_can_read_it(shared: Place, need: Need) -> None:
    need(SKOPEO)
    one = fork(shared, "one", "overlay")
    change(one, "overlay")
    image = commit(shared, "one", "out", "zstd")
    copied = shared.root / "copied"
    # It reads all blobs, and compares them with manifest and config.
    words = ["copy", "--override-os=linux", "--override-arch=amd64", image.name]
    run(["skopeo", *words, f"oci:{copied}:made"], timeout_s=120)
    assert differences(shared, f"oci:{copied}:made", one) == []
    assert differences(shared, f"oci:{copied}:made", shared.target / "rootfs/") != []


def test_what_a_layer_cannot_hold(shared: Place) -> None:
    one = fork(shared, "one", "snapshot")
    (one / "etc/.wh.mine").write_text("")
    with pytest.raises(UsageError, match="/etc/.wh.mine' cannot be in a layer"):
        commit(shared, "one", "out")
    assert not os.path.lexists(shared.root / "out")
    (one / "etc/.wh.mine").unlink()
    create_subvolume(one, "nested")
    with pytest.raises(UsageError, match="has subvolumes of its own"):
        commit(shared, "one", "out")
    with pytest.raises(UsageError, match="no fork 'two'"):
        commit(shared, "two", "out")
    assert os.listdir(shared.target / "commits") == []
    create_snapshot(shared.target / "forks/one", shared.target / "forks", "copy")
    with pytest.raises(UsageError, match="which layer fork 'copy' was made of"):
        commit(shared, "copy", "out")


def test_what_a_killed_command_left_is_removed(shared: Place) -> None:
    one = fork(shared, "one", "snapshot")
    left = shared.target / "commits"
    left.mkdir(exist_ok=True)
    create_snapshot(one, left, "left", read_only=True)
    commit(shared, "one", "out")
    assert os.listdir(left) == []


def test_a_commit_that_ends_stops_no_other(
    shared: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends when another is about to make its snapshot. The end takes no lock."""
    fork(shared, "one", "overlay")
    (found,) = forks_of_image(NAME, base=shared.base)
    with ExitStack() as first:
        first.enter_context(
            commit_module._moment(NAME, found, shared.target, shared.base)
        )

        def late(*words: Any, **options: Any) -> Path:
            first.close()
            return create_snapshot(*words, **options)

        monkeypatch.setattr(commit_module, "create_snapshot", late)
        commit(shared, "one", "out")
    commits = shared.target / "commits"
    assert os.listdir(commits) == [] and commits.stat().st_mode & 0o777 == 0o700
