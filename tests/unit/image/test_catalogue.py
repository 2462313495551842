"""``btrfs-ublk image list --registry``: the versions that a repository has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.images import UNIT, sealed_image, tagged_image
from support.lazy_images import stock_image
from support.needs import Need
from support.web_servers import response, scripted_server

from btrfs_ublk.cli.image import command
from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.catalogue import list_versions
from btrfs_ublk.image.documents import InvalidImageError
from btrfs_ublk.image.reference import parse_reference
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.testing.registry import REGISTRY, loopback_registry


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGES_VARIABLE, str(tmp_path / "images"))


@pytest.fixture
def registry(tmp_path: Path, need: Need) -> Iterator[str]:
    need(REGISTRY)
    home = tmp_path / "registry"
    home.mkdir()
    with loopback_registry(home) as host:
        yield host


def image(*words: object) -> Result:
    return CliRunner().invoke(
        command, [str(word) for word in words], catch_exceptions=False
    )


def test_versions_and_what_is_new_in_them(registry: str, tmp_path: Path) -> None:
    place = f"{registry}/team/app"
    made = {
        "1.2": sealed_image(tmp_path / "two", seed=1),
        # It begins as the one before.
        "1.10": sealed_image(tmp_path / "ten", seed=1, units=11),
        "1.11": sealed_image(tmp_path / "eleven", seed=2),
    }
    for tag, each in made.items():
        image("push", each.name, f"{place}:{tag}", "--insecure")
    image("push", made["1.11"].name, f"{place}:1.11-again", "--insecure")
    image("push", tagged_image(tmp_path / "o", {"f": b"x"}), f"{place}:a", "--insecure")
    stock = stock_image(tmp_path / "stock")
    image("push", stock, f"{place}:b", "--insecure")
    indexed = tmp_path / "indexed"
    image("index", f"{place}:b", "-o", indexed, "--insecure")
    image("push", f"oci:{indexed}", f"{place}:b", "--insecure")

    listed = image("list", "--registry", place, "--insecure", "--new", "--json")
    found = json.loads(listed.stdout)
    assert (found["repository"], found["tags"]) == (place, 6)
    by_tag = {each["tag"]: each for each in found["versions"]}
    tags = ["1.2", "1.10", "1.11", "1.11-again", "a", "b"]
    assert list(by_tag) == tags
    kinds = [each["kind"] for each in by_tag.values()]
    assert kinds == ["sealed"] * 4 + ["ordinary", "indexed"]
    assert not any(each["problem"] for each in by_tag.values())
    for tag, each in made.items():
        assert by_tag[tag]["digest"] == each.digest
        assert by_tag[tag]["sealed"] == each.sealed
        assert by_tag[tag]["pack_bytes"] == each.pack_bytes
        assert by_tag[tag]["data_bytes"] == each.data_bytes
    new = {tag: each["new_bytes"] for tag, each in by_tag.items()}
    packs = {tag: each["pack_bytes"] for tag, each in by_tag.items()}
    assert new["a"] == by_tag["a"]["data_bytes"]
    assert new["b"] == by_tag["b"]["data_bytes"] + packs["b"]
    assert new["1.2"] == made["1.2"].data_bytes + packs["1.2"]
    # Nine units are the same; the tenth was not full.
    assert new["1.10"] == 2 * UNIT + 8192 + packs["1.10"]
    assert new["1.11"] == made["1.11"].data_bytes + packs["1.11"]
    assert new["1.11-again"] == 0

    shown = image("list", "--registry", place, "--insecure", "--last", 2)
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["TAG", "DIGEST", "SEALED", "PACK", "DATA"]
    assert [line.split()[0] for line in lines[1:]] == ["a", "b"]
    assert shown.stderr == "4 more, before these: --last 6\n"


def test_one_that_is_wrong_hides_no_other(registry: str, tmp_path: Path) -> None:
    place = f"{registry}/team/app"
    made = sealed_image(tmp_path / "image")
    for tag in ("1", "2"):
        image("push", made.name, f"{place}:{tag}", "--insecure")
    link = next(tmp_path.glob("registry/storage/**/_manifests/tags/1/current/link"))
    link.write_text(f"sha256:{'0' * 64}")
    shown = image("list", "--registry", place, "--insecure")
    assert [x.split()[2] for x in shown.stdout.splitlines()[1:]] == ["?", "sealed"]
    assert shown.stderr.startswith(f"1: {place}: cannot get the manifest 1: HTTP 404")


def said(answer: bytes, _request: str) -> bytes:
    return response("200 OK", answer)


def test_bad_lists_and_names_are_refused() -> None:
    for answer in (b"[]", b'{"tags": [1]}', b'{"tags": ["../x"]}', b"{"):
        with scripted_server(partial(said, answer)) as server:
            place = parse_reference(f"127.0.0.1:{server.port}/team/app:latest")
            with pytest.raises(InvalidImageError, match="no list of tags"):
                list_versions(place, RegistryAccess(insecure=True), last=1)
    for words, text in (
        (["--registry", "r.example/app:1"], "is a version, and not a repository"),
        (["--last", "3"], "the options of a registry are given"),
    ):
        with pytest.raises(UsageError, match=text):
            image("list", *words)
