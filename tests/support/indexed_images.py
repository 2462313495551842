"""Ordinary images whose layers are made by tar, gzip and zstd, for tests of what is
indexed."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import compressed
from support import indexed_images as made
from support.lazy_images import Place, lazy_place
from support.needs import Need
from support.registry_server import REGISTRY

from btrfs_ublk.image.build import BuildOptions
from btrfs_ublk.image.documents import (
    CONFIG,
    MANIFEST,
    Descriptor,
    digest_of,
    to_bytes,
)
from btrfs_ublk.image.indexed import IndexedImage, index_image
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.places import open_repository
from btrfs_ublk.image.reference import LayoutName, Reference
from btrfs_ublk.image.transfer import push_image
from btrfs_ublk.units import KIB, MIB

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


def tar_of(path: Path) -> bytes:
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
    diff_ids = [digest_of(tar) for _, tar, _ in layers]
    config = PLATFORM | {"rootfs": {"type": "layers", "diff_ids": diff_ids}}
    blobs = [layout.add(kind, stored) for kind, _, stored in layers]
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": dict(layout.add(CONFIG, to_bytes(config)).raw),
        "layers": [dict(each.raw) for each in blobs],
    }
    layout.tag(layout.add(MANIFEST, to_bytes(document)), tag)
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
    tars = [tar_of(each) for each in (lower, upper, last)]
    layers = [
        (GZIP, tars[0], gzip.compress(tars[0], mtime=0)),
        (ZSTD, tars[1], framed(tars[1])),
        (GZIP, tars[2], gzip.compress(tars[2], mtime=0)),
    ]
    return image_of(path, layers)


def layer_of(path: Path, number: int = 0) -> Descriptor:
    """Describe a layer of the only image of a layout."""
    import json

    layout = Layout.opened(path)
    manifest = json.loads(layout.read(layout.find(None)))
    raw = manifest["layers"][number]
    return Descriptor(raw["mediaType"], raw["digest"], raw["size"], raw)


OPTIONS = BuildOptions(threads=1)


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    need(REGISTRY)
    with lazy_place(sparse_path, monkeypatch) as found:
        yield found


def push(place: Place, name: LayoutName, target: Reference) -> str:
    layout = Layout.opened(name.path)
    with open_repository(target, place.access, writing=True) as repository:
        return push_image(layout, layout.find(name.tag), target, repository).digest


def pushed(place: Place) -> tuple[Reference, IndexedImage]:
    """Push an ordinary image, index it where it is, and push that."""
    target = Reference(place.registry.host, "team/app", "1")
    subject = push(place, made.stock_image(place.path / "stock"), target)
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
