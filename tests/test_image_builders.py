"""Images as other builders make them: what containerd takes becomes a sealed image, and
an indexed one, with the tree that containerd unpacks."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from indexed_images import GZIP, image_of
from test_image_sources import Member, directory, entry, link

from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.diff import check_layers
from btrfs_ublk.image.export import export_image
from btrfs_ublk.image.indexed import index_image
from btrfs_ublk.image.reference import Name

pytestmark = pytest.mark.usefixtures("sanitized_helpers")
OPTIONS = BuildOptions(threads=1)
BIG = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def temporary(sparse_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = sparse_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    yield
    assert list(path.iterdir()) == []


def tar(*members: Member) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as file:
        for member in members:
            file.addfile(member, io.BytesIO(member.content))
    return made.getvalue()


def zipped(*tars: bytes) -> list[tuple[str, bytes, bytes]]:
    return [(GZIP, each, gzip.compress(each, 6, mtime=0)) for each in tars]


def tree(name: Name) -> dict[str, object]:
    """The last layer's, as an export has it: content, or what a link leads to."""
    out = io.BytesIO()
    export_image(name, RegistryAccess(), out)
    out.seek(0)
    found: dict[str, object] = {}
    with tarfile.open(fileobj=out) as file:
        for member in file:
            if member.isreg():
                data = file.extractfile(member)
                assert data is not None
                found[member.name] = data.read()
            elif member.issym() or member.islnk():
                found[member.name] = ("->", member.linkname)
            else:
                found[member.name] = oct(member.mode)
    found.pop(".", None)
    return found


def built(path: Path, layers: list[tuple[str, bytes, bytes]]) -> dict[str, object]:
    """Make both forms of an image, which have the same tree."""
    source = image_of(path / "source", layers)
    sealed = build_image(source, path / "sealed", OPTIONS).name
    assert check_layers(sealed, source, RegistryAccess()) == max(1, len(layers))
    return tree(sealed)


# ko and jib begin names with "/", Kaniko has "/" itself, Bazel has "./" and links.
KO = [directory("/"), directory("/ko-app/"), entry("/ko-app/app", BIG, mode=0o755)]
KANIKO = [directory("/"), directory("///etc"), entry("//etc/f", BIG)]
KANIKO += [link("/etc/again", "/etc/f", tarfile.LNKTYPE), link("/l", "../../etc")]


def test_names_begin_at_the_top(sparse_path: Path) -> None:
    upper = [entry("/etc/.wh.again"), entry("/l/new", b"n"), entry("/ko-app/../x", BIG)]
    assert built(sparse_path, zipped(tar(*KO), tar(*KANIKO), tar(*upper))) == {
        "ko-app": "0o755",
        "ko-app/app": BIG,
        "etc": "0o755",
        "etc/f": BIG,
        "etc/new": b"n",
        "l": ("->", "../../etc"),
        "x": BIG,
    }


def test_names_begin_at_the_top_of_an_indexed_image(sparse_path: Path) -> None:
    source = image_of(sparse_path / "source", zipped(tar(*KO), tar(*KANIKO)))
    assert index_image(source, sparse_path / "index", OPTIONS).data_bytes >= len(BIG)
