"""Images that tests build, edit and seal."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import UUID

import pytest
from support.seeds import (  # noqa: F401
    _TABLE,
    GIB,
    SUPER_BYTES,
    SUPER_OFFSETS,
    Image,
    with_checksum,
)
from support.trees import data_ranges

from btrfs_ublk.base.helpers import MKIMAGE, helper_path
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuiltImage, seal
from btrfs_ublk.image.documents import (
    CONFIG,
    DATA_OFFSET,
    MANIFEST,
    Descriptor,
    digest_of,
    to_bytes,
)
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.image.source import open_source
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.units import KIB, MIB

LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
UNIT = 64 * KIB
PLATFORM = {"os": "linux", "architecture": "amd64"}


def tar_of_entries(
    entries: Iterable[tuple[str, bytes | str | None, int]], *, mtime: int = 0
) -> bytes:
    """Return a tar of files, directories (None) and symbolic links (a target), each
    with its mode."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content, mode in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.mtime = mode, mtime
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
                continue
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            tar.addfile(member, io.BytesIO(content or b""))
    return made.getvalue()


def tar_of(files: dict[str, bytes] | bytes) -> bytes:
    """Return a tar of these files; one that is already made, as it is."""
    if isinstance(files, bytes):
        return files
    return tar_of_entries(
        (name, data, 0o755 if data.startswith(b"\x7fELF") else 0o644)
        for name, data in files.items()
    )


def ordinary_image(
    layout: Layout, *layers: dict[str, bytes] | bytes, **config: Any
) -> Descriptor:
    """Add an image of these layers to a layout, without naming it."""
    tars = [tar_of(files) for files in layers]
    stored = [(LAYER, tar, gzip.compress(tar, mtime=0)) for tar in tars]
    return stored_image(layout, stored, **config)


def stored_image(
    layout: Layout, layers: Sequence[tuple[str, bytes, bytes]], **config: Any
) -> Descriptor:
    """The same of layers with their media type: the tar, and what is stored of it."""
    diff_ids = [digest_of(tar) for _, tar, _ in layers]
    about = {**PLATFORM, "rootfs": {"type": "layers", "diff_ids": diff_ids}, **config}
    blobs = [layout.add(kind, stored) for kind, _, stored in layers]
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": dict(layout.add(CONFIG, to_bytes(about)).raw),
        "layers": [dict(each.raw) for each in blobs],
    }
    return layout.add(MANIFEST, to_bytes(document), platform=PLATFORM)


def tagged_image(
    path: Path, *layers: dict[str, bytes] | bytes, tag: str = "app", **config: Any
) -> LayoutName:
    """Make a layout of one ordinary image."""
    layout = Layout.made(path)
    layout.tag(ordinary_image(layout, *layers, **config), tag)
    return LayoutName(path, tag)


def made_by_hand(
    path: Path, *, layers: list[str], seed: int = 1, units: int = 9
) -> dict[str, Any]:
    """Write what mkimage writes, of random bytes; return a report as it prints one.
    The last of so many units and one more is not full."""
    path.mkdir(parents=True)
    some = random.Random(seed)
    with open(path / "seed.img", "wb") as file:
        file.truncate(64 * MIB + 4096)
        for offset, length in ((64 * KIB, 4096), (MIB, 300_000), (64 * MIB, 4096)):
            file.seek(offset)
            file.write(some.randbytes(length))
    data = some.randbytes(units * UNIT + 8192)
    (path / "data").write_bytes(data)
    digests = b"".join(
        hashlib.sha256(data[at : at + UNIT]).digest()
        for at in range(0, len(data), UNIT)
    )
    (path / "digests").write_bytes(digests)
    chain: list[dict[str, Any]] = []
    for number, diff_id in enumerate(layers):
        before = f"{chain[-1]['chain_id']} {diff_id}".encode() if chain else b""
        chain_id = digest_of(before) if before else diff_id
        chain.append(
            {"chain_id": chain_id, "diff_id": diff_id, "subvolume": 256 + number}
        )
    return {
        "device_bytes": DATA_OFFSET + 16 * MIB,
        "fsid": str(UUID(int=seed)),
        "unit": UNIT,
        "layers": chain,
        "counts": {"first_bytes": 0},
    }


def sealed_image(
    path: Path, *, tag: str = "app", seed: int = 1, units: int = 9
) -> BuiltImage:
    """Make a layout with an ordinary image of two layers and a sealed one of any bytes
    beside it, as `image build` does."""
    source = tagged_image(
        path.with_name(f"{path.name}-source"),
        {"etc/os-release": b"ID=test\n", "big": random.Random(seed).randbytes(70_000)},
        {"usr/bin/true": b"\x7fELF"},
        tag=tag,
    )
    layout = Layout.made(path)
    opened = open_source(source, layout, RegistryAccess(), platform="linux/amd64")
    made = path.with_name(f"{path.name}-made")
    report = made_by_hand(
        made, layers=[str(x.diff_id) for x in opened.layers], seed=seed, units=units
    )
    return seal(layout, made, report, opened, tag)


def raw_index(path: Path) -> dict[str, Any]:
    """Return index.json of a layout."""
    found: dict[str, Any] = json.loads((path / "index.json").read_bytes())
    return found


DATA_START = 512 * GIB
FILES = {"seed.img", "data", "digests"}
TIMEOUT_S = 300


def mkimage_raw(description: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper_path(MKIMAGE)],
        input=(
            description if isinstance(description, str) else json.dumps(description)
        ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"},
    )


def mkimage(output: Path, *layers: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Make an image in a directory that is made for it; the report."""
    output.mkdir()
    layers = tuple(layer | {"path": str(layer["path"])} for layer in layers)
    done = mkimage_raw({"layers": layers, "output": str(output)} | settings)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.count("\n") == 1
    assert {path.name for path in output.iterdir()} == FILES
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def content(path: Path) -> list[tuple[int, bytes]]:
    """What is in a sparse file, without its holes."""
    with path.open("rb") as file:
        size = path.stat().st_size
        parts = [(size, b"")]
        for start, length in data_ranges(file.fileno(), size):
            parts.append((start, os.pread(file.fileno(), length, start)))
        return parts


def assemble(image: Path) -> Path:
    """The image as one sparse file, as a device shows it."""
    whole = image / "whole"
    with whole.open("wb") as file, (image / "data").open("rb") as data:
        for start, part in content(image / "seed.img"):
            file.seek(start)
            file.write(part)
        file.seek(DATA_START)
        shutil.copyfileobj(data, file)
        size = file.tell() - DATA_START
        file.truncate(DATA_START + max(1, -(-size // (4 * GIB))) * 4 * GIB)
    return whole


def btrfs_check(whole: Path) -> None:
    """btrfs check has nothing to say, also of the checksums of data."""
    done = subprocess.run(
        ["btrfs", "check", "--readonly", "--check-data-csum", whole],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "no error found" in said
    words = ("warning", "error:", "mismatch", "errors")
    assert not [line for line in said.splitlines() if any(w in line for w in words)]


def _complaints(device: Path) -> list[str]:
    """Return what the kernel says of a device of btrfs, or of itself."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=60)
    of_device = rf"BTRFS (?:warning|error|critical) \(device {device.name}\b.*"
    return re.findall(rf"{of_device}|.*(?:WARNING|BUG):.*", done.stdout)


@contextmanager
def mounted_image(whole: Path, target: Path) -> Iterator[Path]:
    """The image, mounted read-only; the kernel must not complain."""
    target.mkdir()
    with loop_device(whole, read_only=True) as loop:
        before = _complaints(loop.path)
        with mounted(loop.path, target, read_only=True):
            yield target
        assert _complaints(loop.path)[len(before) :] == []


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes such trees")


def directory(path: Path, **more: Any) -> dict[str, Any]:
    return {"kind": "directory", "path": path} | more


def small_tree(top: Path) -> Path:
    (top / "below").mkdir(parents=True)
    (top / "inline").write_bytes(b"a few bytes")
    (top / "below/plain").write_bytes(os.urandom(300 * KIB + 5))
    (top / "below/text").write_bytes(b"what can be compressed " * 40000)
    (top / "below/again").write_bytes(b"what can be compressed " * 40000)
    (top / "link").symlink_to("below/text")
    os.link(top / "inline", top / "below/linked")
    return top


def layer(path: Path, *entries: tuple[str, bytes | None]) -> dict[str, Any]:
    """A tar of files, and of directories, which have no content."""
    modes = [(name, data, 0o755 if data is None else 0o644) for name, data in entries]
    path.write_bytes(tar_of_entries(modes, mtime=1234567890))
    return {"kind": "tar", "path": path, "whiteouts": True}


def three_layers(top: Path) -> list[dict[str, Any]]:
    large = b"large" * 100000
    return [
        layer(
            top / "1.tar",
            *(("etc", None), ("etc/one", b"1"), ("etc/two", b"2")),
            *(("opt", None), ("opt/old", large), ("large", large)),
        ),
        layer(
            top / "2.tar",
            *(("etc/.wh.one", b""), ("opt/.wh..wh..opq", b"")),
            *(("opt/new", b"new" * 5000), ("large-too", large)),
        ),
        layer(top / "3.tar", ("etc/two", b"two"), ("last", b"")),
    ]


HEADER_BYTES, ITEM_BYTES = 101, 25
CHUNK_TREE, ROOT_TREE, CSUM_TREE, FREE_SPACE_TREE = 3, 1, 7, 10
Key = tuple[int, int, int]


@dataclass
class LeafItem:
    key: Key
    data: bytearray

    def set(self, layout: str, at: int, value: int) -> None:
        struct.pack_into("<" + layout, self.data, at, value)

    def get(self, layout: str, at: int) -> int:
        value: int = struct.unpack_from("<" + layout, self.data, at)[0]
        return value


class Editor:
    """An image open for changes; each is written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        image = Image(self._file)
        self.node_bytes = image.super.node_bytes
        self.roots = image.roots() | {
            CHUNK_TREE: image.super.chunk_root,
            ROOT_TREE: image.super.root,
        }

    def __enter__(self) -> Editor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def read(self, offset: int, length: int) -> bytearray:
        self._file.seek(offset)
        return bytearray(self._file.read(length))

    def write(self, offset: int, data: bytes | bytearray) -> None:
        self._file.seek(offset)
        self._file.write(data)
        self._file.flush()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    @contextmanager
    def block(self, bytenr: int, *, csum: bool = True) -> Iterator[bytearray]:
        """A tree block, written back when the ``with`` ends."""
        block = self.read(bytenr, self.node_bytes)
        yield block
        self.write(bytenr, with_checksum(block) if csum else block)

    def leaf_of(self, tree: int, key: Key) -> int:
        """The address of the leaf that has the key, or would have it."""
        bytenr = self.roots[tree]
        while True:
            block = self.read(bytenr, self.node_bytes)
            count, level = struct.unpack_from("<IB", block, 96)
            if not level:
                return bytenr
            for slot in range(count):
                *found, child, _ = struct.unpack_from(
                    "<QBQQQ", block, HEADER_BYTES + slot * 33
                )
                if slot and tuple(found) > key:
                    break
                bytenr = child

    @contextmanager
    def items(self, tree: int, key: Key = (0, 0, 0)) -> Iterator[list[LeafItem]]:
        """The items of the leaf that has the key, written back, packed, in the order
        in which they are left.
        """
        with self.block(self.leaf_of(tree, key)) as block:
            items = []
            (count,) = struct.unpack_from("<I", block, 96)
            for slot in range(count):
                objectid, kind, offset, start, size = struct.unpack_from(
                    "<QBQII", block, HEADER_BYTES + slot * ITEM_BYTES
                )
                start += HEADER_BYTES
                data = block[start : start + size]
                items.append(LeafItem((objectid, kind, offset), data))
            yield items
            block[HEADER_BYTES:] = bytes(len(block) - HEADER_BYTES)
            struct.pack_into("<I", block, 96, len(items))
            end = len(block) - HEADER_BYTES
            for slot, item in enumerate(items):
                end -= len(item.data)
                struct.pack_into(
                    "<QBQII",
                    block,
                    HEADER_BYTES + slot * ITEM_BYTES,
                    *(*item.key, end, len(item.data)),
                )
                block[HEADER_BYTES + end : HEADER_BYTES + end + len(item.data)] = (
                    item.data
                )

    @contextmanager
    def item(self, tree: int, key: Key) -> Iterator[LeafItem]:
        with self.items(tree, key) as items:
            yield next(item for item in items if item.key == key)

    def delete(self, tree: int, key: Key) -> None:
        with self.items(tree, key) as items:
            items[:] = [item for item in items if item.key != key]

    def insert(self, tree: int, key: Key, data: bytes = b"") -> None:
        with self.items(tree, key) as items:
            items.append(LeafItem(key, bytearray(data)))
            items.sort(key=lambda item: item.key)
