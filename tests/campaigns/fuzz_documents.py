"""Has atheris look for documents that Python code takes in a wrong way.

``scripts/torture fuzz-documents --help``. Manifests, packs, and TOML of hosts and
volumes are refused by an error of ours, or taken; any other exception is a failure. It
needs atheris (``pip install atheris``), which sees what code an input reaches. The
input that failed is printed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import zstandard
from fuzz import fuzzing

from btrfs_ublk.base.capabilities import require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.hosts import read_hosts
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image import documents, pack
from btrfs_ublk.volume.definition import read_definition

_DIGEST = "sha256:" + "ab" * 32


class _Atheris:
    """The fuzzer, which is no dependency of ours."""

    name = "atheris"
    hint = "pip install atheris"

    def probe(self) -> str | None:
        return None if find_spec("atheris") else "atheris is not installed"


ATHERIS = _Atheris()


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
    pack.read_digests(path)


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

    what: str
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
TARGETS = {
    "manifest": Target(
        "indexes and manifests of images",
        _manifest,
        [
            _json({"schemaVersion": 2, "config": _BLOB, "layers": [_BLOB, _BLOB]}),
            _json(
                {
                    "schemaVersion": 2,
                    "manifests": [
                        _BLOB | {"platform": {"os": "linux", "architecture": "amd64"}}
                    ],
                }
            ),
        ],
    ),
    "pack": Target(
        "packs of metadata, decompressed",
        _pack,
        [
            _json(_HEADER | {"extents": [[0, 4096]], "layers": [_LAYER], "sources": []})
            + b"\n"
            + bytes(8192)
        ],
    ),
    "hosts": Target(
        "hosts.toml",
        _hosts,
        [
            b'[[via]]\nfor = "a.example:5000"\ncaches = ["http://127.0.0.1:1"]\n'
            b'[[via]]\nfor = "*"\nplain = true\ncaches = ["http://c:1"]\n'
        ],
    ),
    "definition": Target(
        "definitions of volumes",
        _definition,
        [
            b'size = "1T"\nwritable = "20G"\nmount = "/srv/i"\ndeadline = 5\n'
            b'[[file]]\npath = "a"\nurl = "https://h/a"\nsize = 5\n'
            b'[[file]]\npath = "b"\nsource = { kind = "http", url = "http://h/b" }\n'
        ],
    ),
}


def take(name: str, data: bytes, directory: Path) -> None:
    """Give a target one input. Raises what is a failure of ours."""
    with suppress(BtrfsUblkError):
        TARGETS[name].take(data, directory)


_CHILD = """
import atheris, sys
with atheris.instrument_imports(include=["btrfs_ublk", "tomllib"]):
    import fuzz_documents
from pathlib import Path
name, directory = sys.argv[1:3]
take = lambda data: fuzz_documents.take(name, bytes(data), Path(directory))
atheris.Setup([sys.argv[0], *sys.argv[3:]], take)
atheris.Fuzz()
"""
_DONE = re.compile(r"Done (\d+) runs|#(\d+)\s")
_EDGES = re.compile(r" cov: (\d+) ")


def fuzz(
    name: str,
    directory: Path,
    corpus: Path,
    *,
    executions: int,
    seed: int,
    limit_s: float,
) -> dict[str, Any]:
    """Run one target, from its corpus, which grows. Ends at the first input that
    fails."""
    given, inputs = directory / "given", directory / "inputs"
    given.mkdir()
    inputs.mkdir()
    for number, example in enumerate(TARGETS[name].examples):
        (given / str(number)).write_bytes(example)
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, name, str(inputs), f"-runs={executions}"]
        + [f"-seed={seed}", f"-max_total_time={max(1, int(min(limit_s, 1e6)))}"]
        + ["-max_len=4096", f"-artifact_prefix={directory}/", str(corpus), str(given)],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=Path(__file__).parent,
    )
    said = done.stdout + done.stderr
    counts = [int(a or b) for a, b in _DONE.findall(said)]
    result = {
        "target": name,
        "what": TARGETS[name].what,
        "executions": max(counts, default=0),
        "edges": max(map(int, _EDGES.findall(said)), default=0),
        "kept": len(list(corpus.iterdir())),
        "seed": seed,
        "s": time.monotonic() - began_s,
        "problems": [],
    }
    if done.returncode:
        found = [x.read_bytes() for x in directory.glob("crash-*")]
        why = re.findall(r"^\S*(?:Error|Exception)\b.*", said, re.MULTILINE)
        result["problems"] = [f"{name}: {why or said[-500:]} of {found!r}"]
    return result


command = fuzzing(
    TARGETS,
    fuzz,
    name="fuzz-documents",
    title="Fuzzing of documents",
    executions=20_000,
    prepare=lambda _names: require(ATHERIS),
)


if __name__ == "__main__":
    run_command(command, name="fuzz_documents.py")
