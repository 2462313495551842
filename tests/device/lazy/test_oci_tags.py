"""Images of a real registry by their tags, which name one blob when it is added."""

import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices import map_description
from support.needs import Need
from support.registry import INDEX, REGISTRY, Registry, registry_server
from support.volumes import NAME, Place

from btrfs_ublk.base.capabilities import FUSE, ROOT
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.content import Addition
from btrfs_ublk.errors import UsageError
from btrfs_ublk.server import BlockServer
from btrfs_ublk.units import KIB
from btrfs_ublk.volume import down_volume

pytestmark = [pytest.mark.fuse, pytest.mark.usefixtures("in_process")]

REPOSITORY = "some/image"


@pytest.fixture(scope="module")
def registry(
    need: Need, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Registry]:
    need(REGISTRY, ROOT, FUSE)
    with registry_server(tmp_path_factory.mktemp("registry")) as server:
        server.tokens.anonymous = True
        yield server


def by_tag(registry: Registry, tag: str) -> dict[str, Any]:
    place = {"kind": "oci", "registry": registry.host, "repository": REPOSITORY}
    return place | {"tag": tag, "insecure": True}


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_a_tag_is_resolved_when_it_is_added(registry: Registry, tmp_path: Path) -> None:
    """And names other bytes later, which others get who add it then."""
    old, new = os.urandom(70_000), os.urandom(50_000)
    registry.push_image(REPOSITORY, "v1", old)
    told: list[tuple[str, str]] = []
    with BlockServer(map_description(tmp_path), front_end="fuse", queues=1) as server:
        (source,) = server.map().resolve(
            [by_tag(registry, "v1")], resolved=lambda *image: told.append(image)
        )
        assert told == [(f"{registry.host}/{REPOSITORY}:v1", digest_of(old))]
        assert (source["digest"], source["size"]) == (digest_of(old), len(old))
        registry.push_image(REPOSITORY, "v1", new)
        (first,) = server.map_add([source], [Addition()])
        (second,) = server.map_add([by_tag(registry, "v1")], [Addition()])
        for added, data in ((first, old), (second, new)):
            padded = data.ljust(added.length, b"\0")
            assert read_direct(server.device, added.offset, added.length) == padded
        shown = server.map().show(offset=second.offset)["source"]["description"]
        (mirror,) = shown["mirrors"]
        assert mirror["digest"] == digest_of(new) and "tag" not in mirror


def test_an_index_has_one_for_this_machine(registry: Registry, tmp_path: Path) -> None:
    ours = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine())
    if ours is None:
        pytest.skip(f"nobody has said what Go calls {platform.machine()}")
    data = os.urandom(4096)

    def index(tag: str, **architectures: bytes) -> None:
        registry.push_manifest(
            REPOSITORY,
            tag,
            {
                "schemaVersion": 2,
                "mediaType": INDEX,
                "manifests": [
                    {
                        "mediaType": "application/vnd.oci.image.manifest.v1+json",
                        "digest": registry.push_image(REPOSITORY, None, layer),
                        "size": 1,
                        "platform": {"os": "linux", "architecture": architecture},
                    }
                    for architecture, layer in architectures.items()
                ],
            },
        )

    index("all", s390x=os.urandom(100), **{ours: data})
    index("others", s390x=os.urandom(100), mips=os.urandom(100))
    with BlockServer(map_description(tmp_path), front_end="fuse", queues=1) as server:
        (added,) = server.map_add([by_tag(registry, "all")], [Addition()])
        assert read_direct(server.device, added.offset, 4096) == data
        with pytest.raises(UsageError, match=f"no image for linux/{ours}") as caught:
            server.map_add([by_tag(registry, "others")], [Addition()])
        assert "linux/s390x, linux/mips" in str(caught.value)


def test_a_volume_keeps_the_digest(registry: Registry, sparse_path: Path) -> None:
    """Under the tag's name, also when that names something else."""
    place = Place(sparse_path, "fuse")
    old, new = os.urandom(300 * KIB), os.urandom(200 * KIB)
    registry.push_image(REPOSITORY, "v1", old)
    config = sparse_path / "volume.toml"

    def define(*paths: str) -> None:
        files = "".join(
            f'[[file]]\npath = "{path}"\n[file.source]\nkind = "oci"\ntag = "v1"\n'
            f'registry = "{registry.host}"\nrepository = "{REPOSITORY}"\n'
            "insecure = true\n"
            for path in paths
        )
        config.write_text(f'size = "1G"\nmount = "{place.target}"\n{files}')

    def up() -> str:
        done = place.command("up", NAME, "--file", config)
        assert done.returncode == 0, done.stderr
        return done.stderr

    try:
        define("old")
        arrow = f"{registry.host}/{REPOSITORY}:v1 -> "
        assert up() == f"{arrow}{digest_of(old)}\n"
        registry.push_image(REPOSITORY, "v1", new)
        assert up() == ""
        define("old", "new")
        assert up() == f"{arrow}{digest_of(new)}\n"
        for name, data in (("old", old), ("new", new)):
            assert (place.target / name).read_bytes() == data
            for record in ("definition.toml", "files.json"):
                assert digest_of(data) in (place.base / NAME / record).read_text()
        down_volume(NAME, base=place.base)
        done = place.command("up", NAME)
        assert done.returncode == 0 and not done.stderr, done.stderr
    finally:
        place.take_all_down()
