"""Sealed and indexed images in a real registry, beside the ordinary ones."""

import base64
import gzip
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support import compressed
from support.images import stored_image, tagged_image, tar_of
from support.needs import Need
from support.registry import PASSWORD, REGISTRY, USER, Registry, registry_server

from btrfs_ublk.base.capabilities import Capability
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE, VOLUMES_VARIABLE
from btrfs_ublk.containers.images import IMAGE_REF, LazyOptions
from btrfs_ublk.containers.store import SNAPSHOT_REF
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.documents import SEALED_IN, Descriptor, digest_of
from btrfs_ublk.image.indexed import IndexedImage, index_image
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import next_chain_id
from btrfs_ublk.image.reference import LayoutName, Reference, parse_reference
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.image.transfer import open_repository, push_image
from btrfs_ublk.units import KIB, MIB
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
        target = Reference(self.registry.host, repository, tag)
        push(self, built.name, target)
        shutil.rmtree(work)
        return Image(str(target), built.sealed, layers)

    def push_plain(
        self, repository: str, *layers: Layer, tag: str = "1", **config: Any
    ) -> Image:
        """Push an image that has no artifact; ``sealed`` is its manifest's digest."""
        work = self.path / f"plain-{repository.replace('/', '-')}"
        source = tagged_image(work / "source", *layers, config=config)
        target = Reference(self.registry.host, repository, tag)
        digest = push(self, source, target)
        shutil.rmtree(work)
        return Image(str(target), digest, layers)

    def index(self, image: Image) -> str:
        """Push an index of an image; return its digest."""
        target, work = parse_reference(image.name), self.path / "index"
        made = index_image(
            target, work, BuildOptions(threads=1), tag="app", access=self.access
        )
        push(self, made.name, target)
        shutil.rmtree(work)
        return made.digest

    def take_down(self) -> None:
        """Take all volumes down, as they are mounted on the btrfs of the test."""
        for volume in volume_directories():
            if is_anything_up(volume):
                down_volume(volume.name)

    def lose_layers(self, image: Image) -> None:
        """Remove an image's layers from the registry, so that nobody can fetch them."""
        for digest in image.blobs:
            blob_path(self, digest).unlink()


@contextmanager
def lazy_place(
    path: Path, patch: pytest.MonkeyPatch, *, tls: bool = True
) -> Iterator[Place]:
    """Run a registry, and have volumes, images and the policy below ``path``. Without
    ``tls``, the registry wants tokens, by HTTP."""
    for variable, name in (
        (VOLUMES_VARIABLE, "volumes"),
        (IMAGES_VARIABLE, "images"),
        (CONFIG_VARIABLE, "etc"),
    ):
        patch.setenv(variable, str(path / name))
    (path / "etc").mkdir()
    (path / "registry").mkdir()
    with ExitStack() as stack:
        registry = stack.enter_context(registry_server(path / "registry", tls=tls))
        if tls:
            access = RegistryAccess(ca_file=registry.ca_file)
        else:
            login = path / "config.json"
            login.touch(mode=0o600)
            auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            login.write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
            access = RegistryAccess(docker_config=login, insecure=True)
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


GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"
PLAIN = "application/vnd.oci.image.layer.v1.tar"
PLATFORM = {"os": "linux", "architecture": "amd64"}


def write_tree(path: Path) -> None:
    """Make a tree of all that has content, or has none."""
    some = random.Random(3)
    words = [some.randbytes(9).hex() for _ in range(900)]
    for number in range(120):
        directory = path / f"dir{number % 7}" / ("sub" * (number % 3 + 1))
        directory.mkdir(parents=True, exist_ok=True)
        length = some.choice([0, 1, 700, 2048, 2049, 4096, 4097, 20_000, 300_000])
        text = " ".join(some.choices(words, k=length // 18 + 1)).encode()[:length]
        (directory / f"file{number}").write_bytes(
            text if number % 3 else some.randbytes(length)
        )
    (path / "big").write_bytes(some.randbytes(2 * MIB) + b"tail" * 300_000)
    (path / ("long" * 50)).write_bytes(some.randbytes(5000))
    with open(path / "sparse", "wb") as file:
        for at in (0, 5 * KIB, 70 * KIB, 900 * KIB):
            file.seek(at)
            file.write(some.randbytes(3000))
        file.truncate(4 * MIB)
    os.link(path / "big", path / "hard")
    (path / "symbolic").symlink_to("dir1/sub")
    (path / "many").mkdir()
    for number in range(300):  # of those, only the metadata know
        (path / "many" / str(number)).write_bytes(some.randbytes(1500))
    (path / "many" / "last").write_bytes(some.randbytes(30_000))


def tar_of_tree(path: Path) -> bytes:
    argv = ["tar", "--sparse", "--sort=name", "--mtime=@1000000000.5", "--owner=7:7"]
    argv += ["--format=pax", "--pax-option=delete=atime,delete=ctime"]
    argv += ["-C", str(path), "-c", "."]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, timeout=60).stdout


def framed(data: bytes) -> bytes:
    return b"".join(compressed.frames(data, MIB))


def image_of(
    path: Path, layers: list[tuple[str, bytes, bytes]], *, tag: str = "app"
) -> LayoutName:
    """Make a layout of an image. Layers are (media type, tar, what is stored)."""
    layout = Layout.made(path)
    layout.tag(stored_image(layout, layers), tag)
    return LayoutName(path, tag)


def stock_image(path: Path) -> LayoutName:
    """Make an image of three layers: a tree by gzip, changes to it by zstd in frames,
    and one without content."""
    work = path.with_name(f"{path.name}-trees")
    lower, upper, last = work / "lower", work / "upper", work / "last"
    for each in (lower, upper, last):
        each.mkdir(parents=True)
    write_tree(lower)
    for name in ("dir1", "dir2"):
        (upper / name).mkdir()
    (upper / "dir1/.wh.sub").touch()
    (upper / "dir2/.wh..wh..opq").touch()
    (upper / "dir2/only").write_bytes(random.Random(4).randbytes(90_000))
    (upper / "big").write_bytes(random.Random(5).randbytes(700_000))
    (upper / "copy").write_bytes((lower / "many/last").read_bytes())
    (last / "tiny").write_bytes(b"tiny\n")
    tars = [tar_of_tree(each) for each in (lower, upper, last)]
    layers = [
        (GZIP, tars[0], gzip.compress(tars[0], mtime=0)),
        (ZSTD, tars[1], framed(tars[1])),
        (GZIP, tars[2], gzip.compress(tars[2], mtime=0)),
    ]
    return image_of(path, layers)


def layer_of(path: Path, number: int = 0) -> Descriptor:
    """Describe a layer of the only image of a layout."""
    layout = Layout.opened(path)
    manifest = json.loads(layout.read(layout.find(None)))
    raw = manifest["layers"][number]
    return Descriptor(raw["mediaType"], raw["digest"], raw["size"], raw)


OPTIONS = BuildOptions(threads=1)


def place_fixture(*needed: Capability, tls: bool = True) -> Any:
    """Make a fixture of a place, see lazy_place()."""

    @pytest.fixture
    def place(
        need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Place]:
        need(*needed, REGISTRY)
        with lazy_place(sparse_path, monkeypatch, tls=tls) as found:
            yield found

    return place


place = place_fixture()


def push(place: Place, name: LayoutName, target: Reference) -> str:
    layout = Layout.opened(name.path)
    with open_repository(target, place.access, writing=True) as repository:
        return push_image(layout, layout.find(name.tag), target, repository).digest


def pushed(place: Place) -> tuple[Reference, IndexedImage]:
    """Push an ordinary image, index it where it is, and push that."""
    target = Reference(place.registry.host, "team/app", "1")
    subject = push(place, stock_image(place.path / "stock"), target)
    image = index_image(target, place.path / "index", OPTIONS, access=place.access)
    assert image.subject == subject
    assert push(place, image.name, target) == image.digest
    return target, image


def blob_path(place: Place, digest: str) -> Path:
    number = digest.partition(":")[2]
    blobs = place.path / "registry/storage/docker/registry/v2/blobs/sha256"
    return blobs / number[:2] / number / "data"


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
