"""Images whose data begin with what a trace of another build has read."""

import gzip
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.images import TIMEOUT_S, tagged_image
from support.needs import Need
from support.programs import LayerTar, add_shell
from support.volumes import NAME, Place
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, Helper
from btrfs_ublk.base.helpers import MKIMAGE
from btrfs_ublk.content.trace import Trace
from btrfs_ublk.device import device_map
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, BuiltImage, build_image
from btrfs_ublk.image.check import check_image
from btrfs_ublk.image.first import Range, traced_ranges
from btrfs_ublk.image.indexed import index_image
from btrfs_ublk.image.pull import inspect_image
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.image.tree import Difference, diff_images
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume import up_volume

pytestmark = pytest.mark.usefixtures("in_process")

ACCESS = RegistryAccess()
UNIT = 4 * KIB
AMD64 = "linux/amd64"


@pytest.fixture(autouse=True)
def helper(need: Need, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need(Helper(MKIMAGE))
    monkeypatch.setenv(IMAGES_VARIABLE, str(tmp_path / "images"))


def tree(path: Path) -> Path:
    some = random.Random(3)
    (path / "bin").mkdir(parents=True)
    for name in "abcdefgh":
        (path / name).write_bytes(some.randbytes(300_000))
    (path / "bin/tool").write_bytes(bytes(40_000) + some.randbytes(90_000))
    with open(path / "sparse", "wb") as file:
        file.truncate(8 * MIB)
        file.seek(3 * MIB + 5000)
        file.write(some.randbytes(200_000))
    (path / "small").write_text("inline\n")
    os.link(path / "bin/tool", path / "same")
    (path / "again").write_bytes((path / "c").read_bytes())
    (path / os.fsdecode(b"\xff")).write_bytes(some.randbytes(50_000))
    return path


def record(path: Path, root: str | None, *reads: tuple[int, int]) -> Path:
    """Write a trace of (unit, count) of the data of an image."""
    source = {"source": 1, "size": 1, "unit": UNIT, "root": root, "mirrors": []}
    lines: list[object] = [{"format": "btrfs-ublk trace", "version": 1}, source]
    lines += [[1, unit, count, at] for at, (unit, count) in enumerate(reads)]
    lines.append({"end": True, "units": len(reads), "lost": 0, "seconds": 1.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def root_of(image: BuiltImage) -> str:
    return inspect_image(image.name, ACCESS).header.root


def everything(image: BuiltImage) -> list[Range]:
    """Return what lies in the data of an image, in the order in which it lies there."""
    path = image.name.path.with_name("all.trace")
    trace = Trace.load(record(path, root_of(image), (0, 1 << 20)))
    return traced_ranges(trace, image.name.path, image.name, ACCESS)


def build(source: Path, output: Path, **options: Any) -> BuiltImage:
    return build_image(source, output, BuildOptions(unit_bytes=UNIT, **options))


def assert_equal(one: BuiltImage, other: BuiltImage) -> None:
    found: list[Difference] = []
    diff_images(one.name, other.name, ACCESS, found.append)
    assert not found
    assert check_image(other.name, ACCESS).clean


@pytest.mark.parametrize("compression", ["zstd:1", "none"])
def test_what_is_first_lies_in_front_in_that_order(
    tmp_path: Path, compression: str
) -> None:
    source = tree(tmp_path / "tree")
    before = build(source, tmp_path / "before", compression=compression)
    first = [
        ("g", 0, 1),
        ("sparse", 3 * MIB, MIB),
        ("missing", 0, 100),
        ("a", 200_000, 100_000),
        ("bin/tool", 0, 1 << 40),
        ("small", 0, 7),
        ("g", 0, 300_000),
    ]
    after = build(source, tmp_path / "after", compression=compression, first=first)
    assert before.first_bytes == 0 < after.first_bytes
    assert before.data_bytes >= after.data_bytes
    assert_equal(before, after)
    names = list(dict.fromkeys(each.path for each in everything(after)))
    assert names[:5] == ["g", "sparse", "a", "bin/tool", "same"]


def test_what_is_first_is_compressed_harder(tmp_path: Path) -> None:
    source = tmp_path / "tree"
    source.mkdir()
    texts = sorted(Path(json.__file__).parents[1].glob("*.py"))
    data = b"".join(path.read_bytes() for path in texts)[: 2 * MIB]
    for name, part in (("a", data[:MIB]), ("b", data[MIB:])):
        (source / name).write_bytes(part)
    before = build(source, tmp_path / "before", compression="zstd:1")
    whole = [("b", 0, 1 << 40)]
    after = build(source, tmp_path / "after", compression="zstd:1", first=whole)
    assert after.data_bytes < before.data_bytes
    assert_equal(before, after)


def test_a_trace_of_units_becomes_ranges_of_files(tmp_path: Path) -> None:
    source = tree(tmp_path / "tree")
    image = build(source, tmp_path / "image", compression="none")
    rows = everything(image)
    assert {each.path for each in rows} == {
        *"abcdefgh", "again", "same", "bin/tool", "sparse"
    }  # fmt: skip
    # Both files that share their content, and both names of one file, are there.
    assert Range("c", 0, 300_000) in rows and Range("again", 0, 300_000) in rows
    trace = Trace.load(
        record(tmp_path / "trace", root_of(image), (200, 1), (0, 1), (200, 2))
    )
    found = traced_ranges(trace, tmp_path / "image", None, ACCESS)
    assert len(found) == len(set(found))
    assert {each.path for each in found} < {each.path for each in rows}
    again = build(source, tmp_path / "other", compression="none", first=found)
    assert {each.path for each in everything(again)[: len(found)]} == {
        each.path for each in found
    }


@pytest.fixture
def place(need: Need, sparse_path: Path) -> Iterator[Place]:
    need(ROOT, BTRFS, LOOP, FUSE)
    found = Place(sparse_path, "fuse")
    yield found
    found.take_all_down()


@pytest.mark.fuse
def test_a_volume_fetches_it_at_once(place: Place) -> None:
    source = tree(place.root / "tree")
    image = build(source, place.root / "image", first=[("f", 0, 300_000)])
    units = -(-image.first_bytes // UNIT)
    for _ in range(2):  # The second time, all of it is in the cache.
        up_volume(NAME, place.definition(image=str(image.name)), base=place.base)

        def ended() -> Any:
            now = device_map(NAME).prefetch_status()
            return None if now is None or now.is_running else now

        done = wait_until(ended)
        assert done is not None
        assert done.is_complete and done.units == units
        # Read-ahead ends with a mapping.
        ends = [each.end for each in device_map(NAME).list()]
        assert ends == [image.first_bytes, image.data_bytes]
        assert (place.target / "rootfs/f").read_bytes() == (source / "f").read_bytes()
        assert place.command("down", NAME).returncode == 0


def image_of_a_script(root: Path) -> LayoutName:
    """Make an ordinary image whose command is a script."""
    layer = LayerTar(root / "layer.tar.gz")
    some = random.Random(5)
    layer.file("before", some.randbytes(500_000))
    add_shell(layer)
    layer.file("start", b"#!/bin/sh\n" + b"# so that it is not inline\n" * 200)
    layer.file("zz", some.randbytes(500_000))
    tar = gzip.decompress(layer.close().read_bytes())
    return tagged_image(root / "ordinary", tar, config={"Entrypoint": ["/start"]})


def fetched() -> int:
    return int(device_map(NAME).stats()["fetcher"]["bytes_fetched"])


def start(place: Place, *, ahead: int = 0) -> int:
    """Run the script when the prefetch has ended. Return how many bytes that took; the
    script takes none, but that which the server reads ``ahead``."""

    def ended() -> bool:
        now = device_map(NAME).prefetch_status()
        return now is not None and not now.is_running

    wait_until(ended)
    before = fetched()
    argv = ["chroot", place.target / "rootfs", "/start"]
    subprocess.run(argv, check=True, timeout=TIMEOUT_S)
    assert fetched() <= before + ahead
    assert (place.target / "rootfs/before").read_bytes()
    assert fetched() > before + ahead
    return before


@pytest.mark.fuse
def test_an_index_says_what_a_start_reads(place: Place) -> None:
    source = image_of_a_script(place.root)
    options = BuildOptions(unit_bytes=UNIT)
    image = index_image(source, source.path, options, tag="index", platform=AMD64)
    up_volume(NAME, place.definition(image=str(image.name)), base=place.base)
    # Its mapping does not end where that ends which comes first.
    assert 0 < start(place, ahead=256 * KIB) < image.data_bytes - 900_000
    assert place.command("down", NAME).returncode == 0


@pytest.mark.fuse
def test_a_start_reads_what_was_derived_from_its_command(place: Place) -> None:
    source = image_of_a_script(place.root)
    image = build_image(
        *(source, place.root / "image", BuildOptions(unit_bytes=UNIT)), platform=AMD64
    )
    bare = BuildOptions(unit_bytes=UNIT, first=())
    other = build_image(source, place.root / "bare", bare, platform=AMD64)
    assert other.first_bytes == 0 < image.first_bytes < image.data_bytes - 900_000
    assert_equal(image, other)
    up_volume(NAME, place.definition(image=str(image.name)), base=place.base)

    assert start(place) == image.first_bytes
    assert place.command("down", NAME).returncode == 0
