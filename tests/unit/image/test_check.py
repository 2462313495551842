"""``btrfs-ublk image check``: what is right is clean, and what is wrong is named."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.images import CSUM_TREE, Editor, mkimage
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.cli.image import command
from btrfs_ublk.image.build import BuildOptions, build_image, seal
from btrfs_ublk.image.documents import Descriptor
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pull import open_sealed
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.image.source import OpenedSource
from btrfs_ublk.units import KIB

UNIT = 64 * KIB
CONTENT_BYTES = 10 * UNIT
EXTENT_CSUM = ((1 << 64) - 10, 128)  # BTRFS_EXTENT_CSUM_OBJECTID, _KEY


@dataclass(frozen=True)
class Checked:
    """What the command said, with its exit status."""

    status: int
    lines: list[str]

    def line(self, beginning: str) -> str:
        """The only line that begins so."""
        (found,) = (x for x in self.lines if x.startswith(beginning))
        return found


@pytest.fixture(autouse=True)
def progs(need: Need, temporary: None) -> None:
    need(BTRFS_PROGS)


def run(*words: object) -> Result:
    argv = ["check", *map(str, words)]
    return CliRunner().invoke(
        command, argv, standalone_mode=False, catch_exceptions=False
    )


def check(*words: object) -> Checked:
    result = run(*words)
    return Checked(result.return_value, result.stdout.splitlines())


def checked(*words: object) -> dict[str, Any]:
    result = run(*words, "--json")
    report: dict[str, Any] = json.loads(result.stdout)
    assert result.return_value == (0 if report["clean"] else 1)
    assert report["problem_count"] >= len(report["problems"])
    return report


def small_tree(path: Path) -> Path:
    (path / "below").mkdir(parents=True)
    content = random.Random(1).randbytes(CONTENT_BYTES)
    (path / "below" / "content").write_bytes(content)
    (path / "inline").write_bytes(b"a few bytes")
    return path


def damaged_before_packing(
    path: Path, damage: Callable[[Path, dict[str, Any]], None]
) -> LayoutName:
    """Make an image whose parts were changed before their digests were computed."""
    made = path / "made"
    source = {"kind": "directory", "path": small_tree(path / "tree")}
    report = mkimage(made, source, unit=UNIT, compression="none")
    report["unit"] = UNIT
    damage(made, report)
    layout = Layout.made(path / "layout")
    return seal(layout, made, report, OpenedSource(layers=(), config={}), "app").name


@pytest.fixture
def image(sparse_path: Path) -> LayoutName:
    options = BuildOptions(compression="none", unit_bytes=UNIT)
    tree = small_tree(sparse_path / "tree")
    return build_image(tree, sparse_path / "layout", options, tag="app").name


def data_of(name: LayoutName) -> tuple[Path, Descriptor]:
    layout, manifest, _ = open_sealed(name)
    assert manifest.data is not None
    return layout.blob(manifest.data.digest), manifest.data


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_an_image_that_is_right_is_clean(image: LayoutName, sparse_path: Path) -> None:
    done = check(image)
    assert done.status == 0
    about, progs = done.lines
    assert about.startswith(f"{image}: clean; 10 of 10 units right, 640 KiB of 640 KiB")
    assert progs == "btrfs check: clean"
    report = checked(image)
    assert report["units"] == report["right_units"] == 10
    assert report["data_bytes"] == report["right_bytes"] == CONTENT_BYTES
    assert report["metadata_bytes"] > 0 and report["problems"] == []


def test_a_flipped_bit_of_the_data_names_its_unit(image: LayoutName) -> None:
    path, data = data_of(image)
    flip(path, 3 * UNIT + 5000)
    done = check(image)
    assert done.status == 1
    assert "its content has the digest sha256:" in done.line(f"data {data.digest}: ")
    assert "its digest is" in done.line(f"unit 3 at offset {3 * UNIT}: ")
    # The kernel's checksum is that of a block.
    (kernels,) = (x for x in done.lines if "csum 0x" in x)
    assert kernels.startswith("file system: mirror 1 bytenr ")
    offset = 3 * UNIT + 4096
    assert kernels.endswith(f" (unit 3, at offset {offset} of the data)")
    assert f"{image}: 4 problems; 9 of 10 units right, 576 KiB of 640 KiB" in (
        done.lines[-2]
    )
    assert done.lines[-1] == "btrfs check: exited with status 1"


def test_data_that_end_too_early(image: LayoutName) -> None:
    path, data = data_of(image)
    os.truncate(path, 4 * UNIT + 4096)
    done = check(image)
    assert done.status == 1
    assert f"it ends at byte {4 * UNIT + 4096}" in done.line(f"data {data.digest}: ")
    assert "its digest is" in done.line(f"unit 4 at offset {4 * UNIT}: ")
    assert done.line("unit 5 ").startswith(f"unit 5 at offset {5 * UNIT}: it is missin")
    assert "; 4 of 10 units right" in done.lines[-2]


def test_a_flipped_bit_of_the_pack(image: LayoutName) -> None:
    layout, manifest, _ = open_sealed(image)
    flip(layout.blob(manifest.pack.digest), manifest.pack.size // 2)
    report = checked(image)
    (problem,) = report["problems"]
    assert problem.startswith(f"pack {manifest.pack.digest}: its content has the diges")
    assert report["units"] == 0 and report["btrfs_check"].startswith("left out: ")
    # The digest of all data is checked nevertheless.
    path, data = data_of(image)
    flip(path, 0)
    assert [x.split(":")[0] for x in checked(image)["problems"]] == [
        "pack sha256",
        "data sha256",
    ]


def test_a_flipped_bit_of_the_manifest(image: LayoutName) -> None:
    layout, manifest, _ = open_sealed(image)
    path = layout.blob(manifest.digest)
    flip(path, 30)
    report = checked(image)
    (problem,) = report["problems"]
    assert problem.startswith(f"manifest: {path} has the content sha256:")


def test_units_whose_digests_in_the_pack_are_others(sparse_path: Path) -> None:
    """The manifest is right about the data, and the pack is not."""

    def damage(made: Path, report: dict[str, Any]) -> None:
        flip(made / "digests", 7 * 32)

    report = checked(damaged_before_packing(sparse_path, damage))
    (problem,) = report["problems"]
    assert problem.startswith(f"unit 7 at offset {7 * UNIT}: its digest is ")
    assert report["right_units"] == 9 and report["btrfs_check"] == "clean"


def test_a_damaged_tree_in_a_pack_of_the_right_digest(sparse_path: Path) -> None:
    def damage(made: Path, report: dict[str, Any]) -> None:
        with Editor(made / "seed.img") as editor:
            offset = editor.leaf_of(CSUM_TREE, (0, 0, 0)) + 5000
        flip(made / "seed.img", offset)

    report = checked(damaged_before_packing(sparse_path, damage))
    assert report["right_units"] == 10 and report["btrfs_check"] != "clean"
    assert all(x.startswith("file system: ") for x in report["problems"])
    assert not any("temporary" in x for x in report["problems"])


def test_checksums_of_data_that_the_kernel_would_refuse(sparse_path: Path) -> None:
    """Trees, digests and units are right; reading would give EIO."""

    def damage(made: Path, report: dict[str, Any]) -> None:
        with Editor(made / "seed.img") as editor, editor.items(CSUM_TREE) as items:
            item, *_ = (x for x in items if x.key[:2] == EXTENT_CSUM)
            item.data[0] ^= 1

    report = checked(damaged_before_packing(sparse_path, damage))
    assert report["right_units"] == 10
    assert report["problems"][0].startswith("file system: mirror 1 bytenr ")
    assert "(unit 0, at offset 0 of the data)" in report["problems"][0]


def test_a_header_that_is_not_of_this_file_system(sparse_path: Path) -> None:
    other = "6c1b2a52-7a0f-4a52-9f3c-3a8b0c5d7e11"

    def damage(made: Path, report: dict[str, Any]) -> None:
        layer = dict(report["layers"][0], subvolume=257)
        report.update(fsid=other, layers=[*report["layers"], layer])

    report = checked(damaged_before_packing(sparse_path, damage))
    uuid, subvolumes = report["problems"]
    assert uuid.startswith("pack: UUID is ") and uuid.endswith(f"says {other}")
    assert subvolumes == "pack: number of subvolumes is 2, and its header says 3"
    assert report["btrfs_check"] == "clean"
