"""Sealed images in a registry, and what containerd says when it wants their layers."""

from __future__ import annotations

import gzip
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.image_support import tagged_image, tar_of
from support.registry_server import Registry, registry_server

from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE, VOLUMES_VARIABLE
from btrfs_ublk.containers.images import IMAGE_REF, LazyOptions
from btrfs_ublk.containers.store import SNAPSHOT_REF
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.documents import SEALED_IN, digest_of
from btrfs_ublk.image.indexed import index_image
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import next_chain_id
from btrfs_ublk.image.places import open_repository
from btrfs_ublk.image.reference import Reference, parse_reference
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.image.transfer import push_image
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import down_volume
from btrfs_ublk.volume.down import is_anything_up
from btrfs_ublk.volume.store import volume_directories

BIG = 3 * MIB
Files = dict[str, bytes]
Layer = Files | bytes  #: a tar, or what one is made of


@dataclass(frozen=True)
class Image:
    """An image of a registry. ``sealed`` is the digest of its artifact's manifest."""

    name: str
    sealed: str
    layers: tuple[Layer, ...]

    @property
    def chain(self) -> list[str]:
        found: list[str] = []
        for files in self.layers:
            diff_id = digest_of(tar_of(files))
            found.append(next_chain_id(found[-1] if found else None, diff_id))
        return found

    @property
    def blobs(self) -> list[str]:
        """The digests of its layers, as others fetch them."""
        tars = map(tar_of, self.layers)
        return [digest_of(gzip.compress(each, mtime=0)) for each in tars]

    def labels(self, number: int) -> dict[str, str]:
        """What CRI has containerd say when it wants a layer."""
        return {
            SEALED_IN: self.sealed,
            SNAPSHOT_REF: self.chain[number],
            IMAGE_REF: self.name,
        }


def some_layers(seed: int = 1) -> tuple[Files, Files]:
    some = random.Random(seed)
    return (
        {"etc/name": b"lower\n", "big": some.randbytes(BIG)},
        {"etc/name": b"upper\n", "other": some.randbytes(BIG)},
    )


@dataclass
class Place:
    """A test's directories, registry, and policy."""

    path: Path
    registry: Registry
    access: RegistryAccess
    stop_registry: Callable[[], object]

    @property
    def options(self) -> LazyOptions:
        return LazyOptions(access=self.access, writable_bytes=256 * MIB)

    def allow(self, pattern: str | None = None, *, keys: str = "") -> None:
        """Let images of the registry in."""
        pattern = pattern or f"{self.registry.host}/*"
        text = f'[[allow]]\nfrom = "{pattern}"\n{keys}\n'
        (self.path / "etc/images.toml").write_text(text)

    def push(
        self, repository: str, *layers: Layer, tag: str = "1", **config: Any
    ) -> Image:
        """Build an image of these layers, and push it with its artifact."""
        work = self.path / f"build-{repository.replace('/', '-')}"
        source = tagged_image(work / "source", *layers, config=config)
        built = build_image(source, work / "built", BuildOptions(threads=1))
        layout = Layout.opened(built.name.path)
        target = Reference(self.registry.host, repository, tag)
        with open_repository(target, self.access, writing=True) as opened:
            push_image(layout, layout.find("app"), target, opened)
        shutil.rmtree(work)
        return Image(str(target), built.sealed, layers)

    def push_plain(
        self, repository: str, *layers: Layer, tag: str = "1", **config: Any
    ) -> Image:
        """Push an image that has no artifact; ``sealed`` is its manifest's digest."""
        work = self.path / f"plain-{repository.replace('/', '-')}"
        source = tagged_image(work / "source", *layers, config=config)
        layout = Layout.opened(source.path)
        target = Reference(self.registry.host, repository, tag)
        with open_repository(target, self.access, writing=True) as opened:
            digest = push_image(layout, layout.find("app"), target, opened).digest
        shutil.rmtree(work)
        return Image(str(target), digest, layers)

    def index(self, image: Image) -> str:
        """Push an index of an image; return its digest."""
        target, work = parse_reference(image.name), self.path / "index"
        made = index_image(
            target, work, BuildOptions(threads=1), tag="app", access=self.access
        )
        layout = Layout.opened(work)
        with open_repository(target, self.access, writing=True) as opened:
            push_image(layout, layout.find("app"), target, opened)
        shutil.rmtree(work)
        return made.digest

    def take_down(self) -> None:
        """Take all volumes down, as they are mounted on the btrfs of the test."""
        for volume in volume_directories():
            if is_anything_up(volume):
                down_volume(volume.name)

    def lose_layers(self, image: Image) -> None:
        """Remove an image's layers from the registry, so that nobody can fetch them."""
        blobs = self.path / "registry/storage/docker/registry/v2/blobs/sha256"
        for digest in image.blobs:
            number = digest.partition(":")[2]
            (blobs / number[:2] / number / "data").unlink()


@contextmanager
def lazy_place(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Run a registry, and have volumes, images and the policy below ``path``."""
    for variable, name in (
        (VOLUMES_VARIABLE, "volumes"),
        (IMAGES_VARIABLE, "images"),
        (CONFIG_VARIABLE, "etc"),
    ):
        patch.setenv(variable, str(path / name))
    (path / "etc").mkdir()
    (path / "registry").mkdir()
    with ExitStack() as stack:
        registry = stack.enter_context(registry_server(path / "registry", tls=True))
        access = RegistryAccess(ca_file=registry.ca_file)
        place = Place(path, registry, access, stack.close)
        place.allow()
        try:
            yield place
        finally:
            place.take_down()


def elsewhere(image: Image, host: str) -> Image:
    """The same image, by the name that it has at another host."""
    _, _, rest = image.name.partition("/")
    return replace(image, name=f"{host}/{rest}")
