"""Names, layouts, sources and the store of images."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.images import LAYER, ordinary_image, raw_index, sealed_image, tagged_image
from support.needs import moments
from support.processes import interrupted_at_line, killed_at_event

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.documents import (
    DATA,
    MANIFEST,
    METADATA,
    InvalidImageError,
    choose_platform,
    describe,
    describe_blob,
    digest_of,
    may_be_sealed,
    parse_descriptor,
    parse_document,
    parse_sealed_manifest,
    to_bytes,
    write_sealed_manifest,
)
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pull import open_sealed
from btrfs_ublk.image.reference import LayoutName, parse_reference
from btrfs_ublk.image.source import OpenedSource, open_source
from btrfs_ublk.image.store import ImageStore

DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a/b",
        "example.org/a:",
        "example.org/A:b",
        "example.org/a/../b:c",
        "example.org/-a:c",
        "example.org/a:.b",
        f"example.org/a:{'b' * 129}",
        "example.org/a@sha256:00",
        f"example.org/a@sha512:{'0' * 128}",
        "exa mple.org/a:b",
        "u@example.org/a:b",
    ],
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(UsageError):
        parse_reference(text)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"mediaType": "a", "digest": DIGEST, "size": -1},
        {"mediaType": "a", "digest": DIGEST, "size": True},
        {"mediaType": "a", "digest": DIGEST, "size": 1 << 60},
        {"mediaType": "a", "digest": "sha256:../../etc", "size": 1},
        {"mediaType": 1, "digest": DIGEST, "size": 1},
    ],
)
def test_what_is_no_descriptor(value: Any) -> None:
    with pytest.raises(InvalidImageError, match="here"):
        parse_descriptor(value, "here")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"schemaVersion": 1}', b"[" * 100_000, b" " * (5 << 20)],
)
def test_what_is_no_document(data: bytes) -> None:
    with pytest.raises(InvalidImageError):
        parse_document(data, "here")


@pytest.mark.parametrize(
    ("there", "wanted", "chosen"),
    [
        ("amd64/v3 amd64", "linux/amd64", "amd64"),
        ("amd64/v2 amd64/v4 amd64/v3 amd64", "linux/amd64/v3", "amd64/v3"),
        ("amd64/v4 amd64/v2 amd64", "linux/x86_64/v3", "amd64/v2"),
        ("arm64 386", "linux/amd64", "386"),
        ("arm/v5 arm/v7 arm/v6", "linux/arm", "arm/v7"),
        ("arm/v7 arm/v5", "linux/arm/v6", "arm/v5"),
        ("arm64/v8", "linux/arm64", "arm64/v8"),
        ("arm64", "linux/arm64/v8", "arm64"),
        ("arm/v7 arm64", "linux/aarch64", "arm64"),
        ("arm/v7 arm/v6", "linux/arm64", "arm/v7"),
        ("amd64/v3", "linux/amd64", None),
        ("arm/v7", "linux/arm/v6", None),
    ],
)
def test_platforms_are_in_the_order_of_containerd(
    there: str, wanted: str, chosen: str | None
) -> None:
    manifests = [platform_manifest(name) for name in there.split()]
    if chosen is None:
        with pytest.raises(UsageError, match="has no image for linux/a"):
            choose_platform(manifests, wanted, "here")
        return
    expected = platform_manifest(chosen)
    # What says nothing is the last choice.
    manifests = [platform_manifest(""), *manifests]
    assert choose_platform(manifests, wanted, "here") == expected


def platform_manifest(name: str) -> Any:
    architecture, _, variant = name.partition("/")
    about = {"os": "linux", "architecture": architecture, "variant": variant}
    about = {key: value for key, value in about.items() if value}
    return describe(MANIFEST, name.encode(), **({"platform": about} if name else {}))


def test_attestations_are_never_chosen() -> None:
    """BuildKit's, old and new, and other artifacts, whatever platform they tell."""
    ours = platform_manifest("amd64")
    kinds: list[dict[str, Any]] = [
        {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}},
        {"artifactType": "application/vnd.docker.attestation.manifest.v1+json"},
        {"artifactType": "application/vnd.example+json"},
        {"platform": {"os": "unknown", "architecture": "unknown"}},
        {"platform": {"os": "linux", "architecture": "unknown"}},
    ]
    for keys in kinds:
        for platform in ({"platform": dict(ours.platform)}, {}):
            one = describe(MANIFEST, b"about it", **{**platform, **keys})
            assert choose_platform([one, ours], "linux/amd64", "here") == ours
            with pytest.raises(UsageError, match="has no image"):
                choose_platform([one], "linux/amd64", "here")
            if "platform" not in keys:
                assert may_be_sealed([one]) == []


def opened(name: LayoutName, path: Path, platform: str | None = None) -> OpenedSource:
    return open_source(name, Layout.made(path), RegistryAccess(), platform=platform)


def test_layers_of_an_image_have_chain_ids(tmp_path: Path) -> None:
    name = tagged_image(tmp_path / "a", {"one": b"1"}, {".wh.one": b""})
    source = opened(name, tmp_path / "b")
    first, second = source.layers
    assert first.name == first.diff_id
    assert second.name == digest_of(f"{first.diff_id} {second.diff_id}".encode())
    assert first.to_dict()["whiteouts"] is True
    assert all(layer.path.is_relative_to(tmp_path / "b") for layer in source.layers)
    assert source.config["architecture"] == "amd64"


def changed_image(path: Path, change: Any) -> LayoutName:
    layout = Layout.made(path)
    one = ordinary_image(layout, {"a": b"a"})
    document = json.loads(layout.read(one))
    change(document, layout)
    layout.tag(layout.add(one.media_type, to_bytes(document)), "app")
    return LayoutName(path, "app")


def test_images_that_cannot_be_used(tmp_path: Path) -> None:
    def foreign(document: Any, _layout: Layout) -> None:
        document["layers"][0]["mediaType"] = "application/x-encrypted"

    def more_layers(document: Any, _layout: Layout) -> None:
        document["layers"] *= 2

    def no_diff_ids(document: Any, layout: Layout) -> None:
        document["config"] = dict(layout.add("c", b"{}").raw)

    for number, (change, why) in enumerate(
        [
            (foreign, "a layer of the type 'application/x-encrypted'"),
            (more_layers, "has 2 layers, and its config tells of 1"),
            (no_diff_ids, "has no diff IDs"),
        ]
    ):
        name = changed_image(tmp_path / str(number), change)
        with pytest.raises((UsageError, InvalidImageError), match=why):
            opened(name, tmp_path / f"{number}-out")


def test_a_changed_blob_is_noticed(tmp_path: Path) -> None:
    name = tagged_image(tmp_path / "a", {"one": b"1"})
    layout = Layout.opened(tmp_path / "a")
    manifest = json.loads(layout.read(layout.find("app")))
    path = layout.blob(manifest["layers"][0]["digest"])
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    with pytest.raises(InvalidImageError, match="it was changed, or is damaged"):
        opened(name, tmp_path / "b")
    path.write_bytes(content[:-1])
    with pytest.raises(InvalidImageError, match="and its descriptor says"):
        opened(name, tmp_path / "b")
    path.unlink()
    with pytest.raises(InvalidImageError, match="lacks blob"):
        opened(name, tmp_path / "b")


def test_a_layout_is_not_made_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        Layout.made(tmp_path)
    with pytest.raises(UsageError, match="file is no directory"):
        Layout.made(tmp_path / "file")
    with pytest.raises(UsageError, match="is no OCI image layout"):
        Layout.opened(tmp_path)


@pytest.mark.data
def test_a_signal_at_any_line_leaves_no_layout(tmp_path: Path) -> None:
    """Before it returns, nobody else could remove what it has made."""
    path = tmp_path / "layout"
    for number in moments():
        if not interrupted_at_line(
            number, "image/layout.py", lambda: Layout.made(path)
        ):
            break
        assert not path.exists(), f"line {number} of those that ran"
    assert number > 10


@pytest.mark.data
@pytest.mark.parametrize("missing", [["blobs/sha256"], ["blobs/sha256", "blobs"]])
def test_a_layout_that_a_killed_command_began_is_one(
    tmp_path: Path, missing: list[str]
) -> None:
    Layout.made(tmp_path)
    for directory in missing:
        (tmp_path / directory).rmdir()
    layout = Layout.made(tmp_path)
    assert layout.read(layout.add(LAYER, b"1")) == b"1"


@pytest.mark.data
def test_what_a_killed_command_left_in_a_layout_goes(tmp_path: Path) -> None:
    layout = Layout.made(tmp_path)
    dead = tmp_path / "blobs" / ".new-dead"
    dead.mkdir()
    (dead / "blob").write_bytes(b"half")
    with layout.scratch() as living, layout.scratch() as other:
        assert living.is_dir() and other.is_dir() and not dead.exists()
        with layout.adding(LAYER) as (file, done):
            file.write(b"whole")
        assert layout.read(done[0]) == b"whole" and living.is_dir()
    assert [x.name for x in (tmp_path / "blobs").iterdir()] == ["sha256"]


@pytest.mark.data
def test_tags_of_two_writers_are_all_there(tmp_path: Path) -> None:
    layout = Layout.made(tmp_path)
    one = layout.add(LAYER, b"1")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: Layout(tmp_path).tag(one, f"t{n}"), range(32)))
    assert len(raw_index(tmp_path)["manifests"]) == 32


@pytest.mark.data
@pytest.mark.parametrize("before", ["nothing", "directory", "layout"])
def test_a_build_that_fails_leaves_no_layout(tmp_path: Path, before: str) -> None:
    path = tmp_path / "layout"
    if before == "directory":
        path.mkdir()
    elif before == "layout":
        Layout.made(path)
    (bad := tmp_path / "bad.tar").write_bytes(b"no tar" * 1000)
    found = set(tmp_path.rglob("*"))
    with pytest.raises(BtrfsUblkError, match="tar"):
        build_image(bad, path, BuildOptions())
    assert set(tmp_path.rglob("*")) == found


def test_a_layout_stays_while_another_command_is_at_work(tmp_path: Path) -> None:
    path = tmp_path / "layout"
    failed, other = Layout.made(path), Layout.made(path)
    with other.scratch():
        failed.remove_if_empty()
        one = other.add(LAYER, b"1")
    failed.remove_if_empty()
    assert other.read(one) == b"1"


def stored(store: ImageStore, path: Path, seed: int) -> str:
    return pulled(store, sealed_image(path, seed=seed).name)


def pulled(store: ImageStore, name: LayoutName) -> str:
    layout, manifest, data = open_sealed(name)
    with store.adding() as new:
        os.link(layout.blob(manifest.pack.digest), new / "pack")
        return store.add(new, data)


def test_gc_keeps_what_is_used_or_pinned(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    assert store.images() == [] and store.collect(()) == []
    digests = [stored(store, tmp_path / str(seed), seed) for seed in range(4)]
    for number, digest in enumerate(digests):
        store.name(f"example.org/a:{number}", digest, pinned=number == 0)
    store.name("example.org/a:2", digests[1])  # the tag has moved
    assert [image.names for image in store.images()] == [
        ("example.org/a:0",),
        ("example.org/a:1", "example.org/a:2"),
        ("example.org/a:3",),
        (),
    ]
    planned = store.collect({digests[3]}, dry_run=True)
    assert {image.digest for image in planned} == {digests[1], digests[2]}
    assert len(store.images()) == 4
    store.collect({digests[3]})
    assert {image.digest for image in store.images()} == {digests[0], digests[3]}
    assert store.find("example.org/a:1") is None
    store.pin("example.org/a:0", pinned=False)
    store.collect(())
    assert store.images() == []
    with pytest.raises(UsageError, match="no image was pulled as"):
        store.pin("example.org/a:0", pinned=True)


def test_gc_leaves_what_a_command_is_taking(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    digest = stored(store, tmp_path / "image", 1)
    with store.holding(digest) as found:
        assert found is not None and store.collect(()) == []
        assert found.pack.is_file()
    assert found is not None
    found.pack.unlink()  # by hand, say
    assert [image.digest for image in store.collect(())] == [digest]
    with store.holding(digest) as found:
        assert found is None


def test_errors_beside_the_store_are_not_blamed_on_it(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    with pytest.raises(FileNotFoundError), store.adding():
        os.stat(tmp_path / "none")
    assert not list(store.path.glob(".new-*"))


def test_gc_removes_what_a_killed_command_left(tmp_path: Path) -> None:
    """Wherever it was killed, also gc itself."""
    image = sealed_image(tmp_path / "image").name
    store = ImageStore(tmp_path / "store")

    def pull() -> None:
        store.name("example.org/a:1", pulled(store, image))

    def collect() -> None:
        store.collect(())

    pull()
    for command in (pull, collect):
        for number in moments():
            was_killed = killed_at_event(number, command)
            collect()
            assert sorted(os.listdir(store.path)) == [
                *(".lock", "references.json", "sha256")
            ], f"{command.__name__} at {number}"
            names = json.loads((store.path / "references.json").read_text())
            assert names["references"] == {} and store.images() == []
            if not was_killed:
                break
            if command == collect:
                pull()
        assert number > 10


def test_the_store_is_closed_to_others(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    digest = stored(store, tmp_path / "image", 1)
    assert store.path.stat().st_mode & 0o777 == 0o700
    for path in (store.path / "sha256" / digest[7:]).iterdir():
        assert path.stat().st_nlink
    store.path.chmod(0o777)
    with pytest.raises(Exception, match="is writable for others"):
        store.images()


def test_a_pack_of_any_size_is_not_fetched() -> None:
    def manifest(pack_bytes: int) -> bytes:
        return write_sealed_manifest(
            describe_blob(METADATA, DIGEST, pack_bytes), describe_blob(DATA, DIGEST, 5)
        )

    assert parse_sealed_manifest(manifest(16 << 30), "it").data_bytes == 5
    with pytest.raises(InvalidImageError, match="pack of 17179869185 bytes, more than"):
        parse_sealed_manifest(manifest((16 << 30) + 1), "it")


def test_an_index_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    layout = Layout.made(tmp_path / "layout")
    with open(layout.path / "index.json", "wb") as file:
        file.truncate(1 << 44)
    with pytest.raises(InvalidImageError, match="has more than 4194304 bytes"):
        layout.images()
