"""Images for tests: ordinary ones of a few layers, and sealed ones of any bytes, which
no kernel is to mount.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any
from uuid import UUID

from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuiltImage, seal
from btrfs_ublk.image.documents import (
    CONFIG,
    MANIFEST,
    Descriptor,
    digest_of,
    to_bytes,
)
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import DATA_OFFSET
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.image.source import open_source
from btrfs_ublk.units import KIB, MIB

LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
UNIT = 64 * KIB
PLATFORM = {"os": "linux", "architecture": "amd64"}


def tar_of(files: dict[str, bytes] | bytes) -> bytes:
    """Return a tar of these files; one that is already made, as it is."""
    if isinstance(files, bytes):
        return files
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if data.startswith(b"\x7fELF"):
                member.mode = 0o755
            tar.addfile(member, io.BytesIO(data))
    return made.getvalue()


def ordinary_image(
    layout: Layout, *layers: dict[str, bytes] | bytes, **config: Any
) -> Descriptor:
    """Add an image of these layers to a layout, without naming it."""
    tars = [tar_of(files) for files in layers]
    about = {
        **PLATFORM,
        "rootfs": {"type": "layers", "diff_ids": [digest_of(x) for x in tars]},
        **config,
    }
    blobs = [layout.add(LAYER, gzip.compress(x, mtime=0)) for x in tars]
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
