"""``btrfs-ublk image build --check``: layers are what their chain IDs say."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.images import mkimage, tagged_image, tar_of

from btrfs_ublk.cli.image import command
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, BuiltImage, build_image, seal
from btrfs_ublk.image.documents import InvalidImageError
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.image.source import open_source
from btrfs_ublk.image.tree import check_layers
from btrfs_ublk.units import KIB

pytestmark = pytest.mark.usefixtures("temporary")

PLATFORM = "linux/amd64"
UNIT = 64 * KIB
LOWER = {"etc/os-release": b"ID=test\n", "big": b"1" * 70_000}
UPPER = {"usr/bin/true": b"\x7fELF", ".wh.big": b""}


def test_what_was_built_is_right(sparse_path: Path) -> None:
    source = tagged_image(sparse_path / "ordinary", LOWER, UPPER)
    (sparse_path / "tree").mkdir()
    (sparse_path / "tree" / "file").write_bytes(b"content")
    for number, one in enumerate((source, sparse_path / "tree")):
        argv = ["build", str(one), "-o", str(sparse_path / f"{number}"), "--check"]
        argv += ["--platform", PLATFORM, "--json"]
        done = CliRunner().invoke(command, argv, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        made: dict[str, Any] = json.loads(done.stdout)
        assert made["layers"] == 2 - number


def poisoned(path: Path, source: LayoutName, **changes: bytes) -> LayoutName:
    """A sealed image with the chain IDs of another one's layers, and its own content:
    all of its digests are right."""
    tar = path / "tar"
    tar.write_bytes(tar_of({**LOWER, **changes}))
    upper = path / "upper"
    upper.write_bytes(tar_of(UPPER))
    layers = [
        {"kind": "tar", "path": str(x), "whiteouts": True, "name": x.name}
        for x in (tar, upper)
    ]
    report = mkimage(path / "made", *layers, unit=UNIT)
    layout = Layout.made(path / "layout")
    opened = open_source(source, layout, RegistryAccess(), platform=PLATFORM)
    for said, layer in zip(report["layers"], opened.layers, strict=True):
        said |= {"chain_id": layer.name, "diff_id": layer.diff_id}
    return seal(layout, path / "made", report | {"unit": UNIT}, opened, "app").name


def test_a_chain_id_that_lies(sparse_path: Path) -> None:
    source = tagged_image(sparse_path / "ordinary", LOWER, UPPER)
    path = sparse_path / "right"
    path.mkdir()
    name = poisoned(path, source)
    assert check_layers(name, source, RegistryAccess(), platform=PLATFORM) == 2
    path = sparse_path / "poisoned"
    path.mkdir()
    name = poisoned(path, source, big=b"2" * 70_000)
    # The last layer removes what the first one lies about.
    with pytest.raises(InvalidImageError, match=r"layer sha256:.*: changed /big: cont"):
        check_layers(name, source, RegistryAccess(), platform=PLATFORM)


def test_an_image_that_fails_its_check_has_no_name(sparse_path: Path) -> None:
    source = tagged_image(sparse_path / "ordinary", LOWER, UPPER)
    output = sparse_path / "built"

    def refuse(name: LayoutName) -> None:
        assert Layout.opened(output).find(name.tag)
        raise InvalidImageError(f"{name} lies")

    def build(**options: Any) -> BuiltImage:
        return build_image(
            source, output, BuildOptions(unit_bytes=UNIT), platform=PLATFORM, **options
        )

    with pytest.raises(InvalidImageError, match="lies"):
        build(check=refuse)
    assert not Layout.opened(output).images()
    before = build()
    (again,) = Layout.opened(output).images()
    with pytest.raises(InvalidImageError, match="lies"):
        build(check=refuse, tag=before.name.tag)
    assert Layout.opened(output).images() == [again]
