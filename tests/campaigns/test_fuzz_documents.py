"""Documents that Python parses, changed at random.

Manifests, packs, and TOML of hosts and volumes are refused by an error of ours, or
taken; any other exception is a failure.
"""

import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import zstandard

from btrfs_ublk.base.hosts import read_hosts
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image import documents, pack
from btrfs_ublk.volume.definition import read_definition

_DIGEST = "sha256:" + "ab" * 32


def _manifest(data: bytes, directory: Path) -> None:
    with suppress(BtrfsUblkError):
        documents.parse_sealed_manifest(data, "it")
    found = documents.parse_document(data, "it")
    with suppress(BtrfsUblkError):
        list(documents.blobs_of(found, "it"))
    manifests = documents.descriptors(found, "manifests", "it")
    documents.may_be_sealed(manifests)
    documents.ordinary_images(manifests)
    documents.choose_platform(manifests, "linux/amd64", "it")


def _pack(data: bytes, directory: Path) -> None:
    path = directory / "pack"
    path.write_bytes(zstandard.compress(pack.MAGIC + data, 1))
    header = pack.read_header(path)
    pack.check_data(header, 4096)
    with TemporaryDirectory(dir=directory) as new:
        pack.unpack(path, Path(new, "seed.img"))


def _hosts(data: bytes, directory: Path) -> None:
    path = directory / "hosts.toml"
    path.touch(mode=0o600)
    path.write_bytes(data)
    read_hosts(path)


def _definition(data: bytes, directory: Path) -> None:
    path = directory / "definition.toml"
    path.write_bytes(data)
    read_definition(path).to_toml()


@dataclass(frozen=True)
class Target:
    """``take`` may raise BtrfsUblkError."""

    take: Callable[[bytes, Path], None]
    examples: Sequence[bytes]


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


_BLOB = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "size": 5}
_BLOB |= {"digest": _DIGEST, "annotations": {"a": "b"}}
_HEADER: dict[str, Any] = {key: 4096 for key in pack._TYPES}
_HEADER |= {k: "ab" * 32 for k, kind in pack._TYPES.items() if kind is str}
_HEADER |= {"device_bytes": 1 << 40, "fsid": "6d0f9fa0-8ad1-4f6b-b1b5-7b3a1b7d5f11"}
_LAYER = {"chain_id": _DIGEST, "diff_id": _DIGEST, "subvolume": 256}
_HEADER |= {k: {} for k, kind in pack._TYPES.items() if kind is dict}
_PLATFORM = {"platform": {"os": "linux", "architecture": "amd64"}}
_MANIFEST = {"schemaVersion": 2, "config": _BLOB, "layers": [_BLOB, _BLOB]}
_INDEX = {"schemaVersion": 2, "manifests": [_BLOB | _PLATFORM]}
_PACK = _HEADER | {"extents": [[0, 4096]], "layers": [_LAYER], "sources": []}
_HOSTS = b"""
[[via]]
for = "a.example:5000"
caches = ["http://127.0.0.1:1"]
[[via]]
for = "*"
plain = true
caches = ["http://c:1"]
"""
_VOLUME = b"""
size = "1T"
writable = "20G"
mount = "/srv/i"
deadline = 5
[[file]]
path = "a"
url = "https://h/a"
size = 5
[[file]]
path = "b"
source = { kind = "http", url = "http://h/b" }
"""
TARGETS = {
    "manifest": Target(_manifest, [_json(_MANIFEST), _json(_INDEX)]),
    "pack": Target(_pack, [_json(_PACK) + b"\n" + bytes(8192)]),
    "hosts": Target(_hosts, [_HOSTS]),
    "definition": Target(_definition, [_VOLUME]),
}


def take(name: str, data: bytes, directory: Path) -> None:
    """Give a target one input. Raises what is a failure of ours."""
    with suppress(BtrfsUblkError):
        TARGETS[name].take(data, directory)


#: What takes the place of parts of documents.
WORDS = [
    x.encode() for x in '[ { " ] } null -1 1e999 \\ud800 true "" [] {} , = #'.split()
]
WORDS += [b"\xff", b"\0", b"\n", b"9" * 5000, b"[" * 3000]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_changed_documents(tmp_path: Path, name: str) -> None:
    draw = random.Random(1)
    for example in TARGETS[name].examples:
        take(name, example, tmp_path)
        for _ in range(300):
            changed = bytearray(example)
            for _ in range(draw.randrange(1, 5)):
                at = draw.randrange(len(changed))
                part = draw.choice(WORDS)
                changed[at : at + draw.randrange(len(part) + 1)] = part
            take(name, bytes(changed), tmp_path)
