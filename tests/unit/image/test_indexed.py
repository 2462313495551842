"""Indexed images: made of ordinary ones, beside them in a real registry, and read."""

import gzip
import hashlib
import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import compressed
from support import lazy_images as made
from support.images import PLATFORM
from support.lazy_images import OPTIONS, Place, blob_path, flip, push, pushed
from support.needs import Need
from support.web_servers import response, scripted_server

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image import pull
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import build_image
from btrfs_ublk.image.check import check_image
from btrfs_ublk.image.documents import (
    CREATED,
    INDEX,
    INDEXED,
    MANIFEST,
    METADATA,
    InvalidImageError,
    describe,
    digest_of,
    to_bytes,
    write_sealed_manifest,
)
from btrfs_ublk.image.indexed import IndexedImage, index_image
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import unpack, write_pack
from btrfs_ublk.image.policy import RefusedImageError
from btrfs_ublk.image.pull import NotSealedError, inspect_image, look_up, pull_image
from btrfs_ublk.image.reference import LayoutName, Reference
from btrfs_ublk.image.registry import RegistryRepository
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.transfer import open_repository
from btrfs_ublk.image.tree import export_image
from btrfs_ublk.units import KIB, MIB

place = made.place  # a fixture

SKOPEO = Program("skopeo", package="skopeo")


def exported(name: Any, place: Place) -> str:
    path = place.path / "exported"
    with open(path, "wb") as out:
        export_image(name, place.access, out, directory=place.path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.usefixtures("sanitized_helpers")
def test_an_index_is_beside_the_image(place: Place, need: Need) -> None:
    """The tag, and what others see by it, stay. All is pulled by the tag; what is read
    is what a sealed image of the same layers has."""
    need(SKOPEO)
    target, image = pushed(place)
    with open_repository(target, place.access) as repository:
        assert repository.document("1").digest == image.subject
        (one,) = repository.referrers(image.subject)
        assert one.digest == image.digest and one.raw["artifactType"] == INDEXED
        assert repository.has_document(image.subject.replace(":", "-"))
    argv = ["skopeo", "copy", "--src-cert-dir", str(place.path / "certs")]
    (place.path / "certs").mkdir()
    (place.path / "certs/ca.crt").write_bytes(place.registry.ca_file.read_bytes())
    ordinary = LayoutName(place.path / "copied", "app")
    run([*argv, f"docker://{target}", str(ordinary)], timeout_s=60)

    store = ImageStore()
    pulled = pull_image(target, place.access, store)
    assert pulled.digest == image.digest
    assert pulled.fetched_bytes < image.pack_bytes + 10 * KIB
    (stored,) = store.images()
    assert stored.data_bytes == image.data_bytes
    report = inspect_image(target, place.access).to_dict()
    assert report["subject"] == image.subject and len(report["sources"]) == 2

    assert check_image(target, place.access, directory=place.path).to_dict()["clean"]
    built = build_image(ordinary, place.path / "built", OPTIONS)
    assert exported(target, place) == exported(built.name, place)
    # Two that are made are equal, also without a registry.
    again = index_image(ordinary, place.path / "again", OPTIONS)
    assert again.digest == image.digest


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ("303 See Other\nLocation: https://elsewhere.invalid/list", ""),
        ("200 OK\nContent-Type: text/html", ""),
        ("406 Not Acceptable", ""),
        ("403 Forbidden", "HTTP 403"),
    ],
)
@pytest.mark.parametrize("gitlab", [False, True])
def test_registries_that_list_no_referrers(
    status: str, why: str, gitlab: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GHCR, Google's and others answer the first request so. GitLab has the subject at
    the tag that such registries shall have instead."""
    children = [describe(MANIFEST, b"child", platform=PLATFORM)]
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": [dict(one.raw) for one in children],
    }
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": []}
    kind, data = (INDEX, to_bytes(index)) if gitlab else (MANIFEST, to_bytes(manifest))
    subject = digest_of(data)
    tag = subject.replace(":", "-")
    put: list[bytes] = []

    def answer(request: str) -> bytes:
        if "/referrers/" in request:
            return response(status, b"<html>log in</html>")
        if f"/manifests/{tag} " in request and not gitlab:
            return response("404 Not Found")
        return response(f"200 OK\nContent-Type: {kind}", data)

    one = describe(MANIFEST, b"0", artifactType=INDEXED)
    with scripted_server(answer) as server:
        target = Reference(f"127.0.0.1:{server.port}", "app", "1")
        access = RegistryAccess(insecure=True)
        with open_repository(target, access, writing=True) as repository:
            if not why:
                assert repository.referrers(subject) == []
            if not gitlab:
                with pytest.raises(NotSealedError) as refused:
                    look_up(target, repository)
                text = f"{target} is an ordinary image only"
                assert refused.value.message.startswith(text)
                assert why in refused.value.message
                assert (refused.value.message == text) is (not why)
            monkeypatch.setattr(repository, "put_document", lambda *x: put.append(x[2]))
            repository.put_referrer(one, subject, b"0")
    listed = json.loads(put[-1])["manifests"]
    assert [each["digest"] for each in listed] == [one.digest]


def test_what_is_wrong_with_layers_is_found(place: Place) -> None:
    target, image = pushed(place)
    layer = made.layer_of(place.path / "stock")
    path = blob_path(place, layer.digest)
    flip(path, layer.size // 2)
    found = check_image(target, place.access, directory=place.path)
    assert found.problems[0].startswith(f"layer {layer.digest}: its content has the")
    path.unlink()
    found = check_image(target, place.access, directory=place.path)
    assert found.problem_count == 1
    assert found.problems[0].startswith(f"layer {layer.digest}: it is not in {target}")
    assert found.btrfs_check == "left out: layers are missing"


def test_who_may_bring_an_index(place: Place) -> None:
    """The digest of an image says nothing of what refers to it."""
    target, image = pushed(place)
    (place.path / "etc/images.toml").unlink()
    store = ImageStore()
    with pytest.raises(RefusedImageError, match="there is no") as caught:
        pull_image(target.at(image.subject), place.access, store)
    assert caught.value.hint and image.digest in caught.value.hint
    assert pull_image(target.at(image.digest), place.access, store).why
    place.allow(keys='keys = ["none.pub"]')
    with pytest.raises((RefusedImageError, UsageError), match="none.pub"):
        pull_image(target, place.access, store)


def changed_index(image: IndexedImage, path: Path, **changes: Any) -> LayoutName:
    """Make an artifact whose first source is another."""
    before, layout = Layout.opened(image.name.path), Layout.made(path)
    manifest = json.loads(before.read(before.find(image.name.tag)))
    pack = before.blob(manifest["layers"][0]["digest"])
    work = path.with_name(f"{path.name}-work")
    work.mkdir()
    header, digests = unpack(pack, work / "seed.img")
    sources = [replace(header.sources[0], **changes), *header.sources[1:]]
    parts = [work / f"{x}.{n}" for n in range(2) for x in ("index", "selection")]
    with layout.adding(METADATA) as (file, done):
        header = replace(header, sources=tuple(sources))
        write_pack(file, header, work / "seed.img", digests.units, parts)
    subject = replace(before.find(None), raw=manifest["subject"])
    data = write_sealed_manifest(done[0], None, subject)
    layout.add(manifest["config"]["mediaType"], b"{}")
    layout.tag(layout.add(MANIFEST, data, artifactType=INDEXED), "app")
    return LayoutName(path, "app")


def test_an_index_of_other_layers(place: Place) -> None:
    target, image = pushed(place)
    wrong = ({"layer": f"sha256:{'1' * 64}"}, {"layer_bytes": 7}, {"codec": "zstd"})
    for number, changes in enumerate(wrong):
        name = changed_index(image, place.path / f"changed{number}", **changes)
        digest = push(place, name, target)
        store = ImageStore()
        for reference in (target, target.at(digest)):
            with pytest.raises(InvalidImageError, match="has no such layer"):
                pull_image(reference, place.access, store)
        assert store.images() == []


def test_an_index_goes_only_to_its_image(place: Place) -> None:
    target, image = pushed(place)
    nothing = replace(target, tag="nothing")
    with pytest.raises(UsageError, match=f"is not the image {image.subject}"):
        push(place, image.name, nothing)
    other = replace(target, tag="other")
    tar = made.tar_of_tree(place.path / "stock-trees/last")
    layers = [(made.GZIP, tar, gzip.compress(tar, mtime=0))]
    push(place, made.image_of(place.path / "other", layers), other)
    with pytest.raises(UsageError, match="push it to the repository|is not the image"):
        push(place, image.name, other)
    with pytest.raises(UsageError, match="is an ordinary image only"):
        pull_image(other, place.access, ImageStore())
    with pytest.raises(UsageError, match="is another image, which would lose its name"):
        index_image(
            LayoutName(place.path / "other", "app"), place.path / "other", OPTIONS
        )


NO_TAR = b"text" * 900


def big_tar() -> bytes:
    """Of a file that needs more than one point."""
    member = tarfile.TarInfo("big")
    member.size = 17 * MIB
    data = random.Random(9).randbytes(member.size)
    return b"".join([member.tobuf(), data, bytes(10 * KIB)])


@pytest.mark.usefixtures("sanitized_helpers")
@pytest.mark.parametrize(
    ("kind", "stored", "says"),
    [
        (made.ZSTD, compressed.zstd, "cannot be indexed: it: th"),  # one frame
        (made.PLAIN, bytes, "only those that are compressed by gzip or"),
        (made.GZIP, lambda tar: gzip.compress(tar, 1)[:-9], "cut|damaged"),
        (made.GZIP, bytes, "cannot be decoded as gzip"),
        ("application/vnd.x.layer", bytes, "no tar"),
        (made.GZIP, lambda tar: gzip.compress(NO_TAR), "damaged"),
    ],
    ids=["one frame", "plain", "cut", "no gzip", "foreign", "no tar"],
)
def test_layers_that_are_refused(
    tmp_path: Path, kind: str, stored: Callable[[bytes], bytes], says: str
) -> None:
    tar = NO_TAR if says == "damaged" else big_tar()
    source = made.image_of(tmp_path / "source", [(kind, tar, stored(tar))])
    with pytest.raises(BtrfsUblkError, match=says):
        index_image(source, tmp_path / "index", OPTIONS)
    assert not (tmp_path / "index").exists()


def test_the_newest_index_that_is_allowed_is_taken(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, image = pushed(place)
    index = changed_index(image, place.path / "changed", layer_bytes=7)
    digest = push(place, index, target)

    def taken() -> str:
        return pull_image(target, place.access, ImageStore()).digest

    # Only the older one is signed; the last in the list is the newer one.
    monkeypatch.setattr(
        pull,
        "signer_of",
        lambda _, one, keys: keys[0] if one == image.digest else None,
    )
    (place.path / "etc/none.pub").touch()
    place.allow(keys='keys = ["none.pub"]')
    with open_repository(target, place.access) as repository:
        assert look_up(target, repository)[2].digest == digest
        listed = repository.referrers(image.subject)
    assert taken() == image.digest

    # What says when it was made comes first. That is not the clock's time.
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    again = index_image(target, place.path / "again", OPTIONS, access=place.access)
    assert push(place, again.name, target) == again.digest
    with open_repository(target, place.access) as repository:
        (last,) = repository.referrers(image.subject)[2:]
    assert last.annotations == {CREATED: "1970-01-01T00:00:01+00:00"}
    one = next(x for x in listed if x.digest == image.digest)
    dated = {**one.raw, "annotations": {CREATED: "2026-11-25T00:00:00Z"}}
    monkeypatch.setattr(
        RegistryRepository,
        "referrers",
        lambda *_: [replace(x, raw=dated) if x == one else x for x in listed],
    )
    with open_repository(target, place.access) as repository:
        assert look_up(target, repository)[2].digest == image.digest
