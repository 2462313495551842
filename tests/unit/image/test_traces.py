"""Traces that refer to images, in a real registry."""

import json
from pathlib import Path

import pytest
from support import lazy_images as made
from support.lazy_images import Place, some_layers
from support.web_servers import response, scripted_server

from btrfs_ublk.content.trace import Trace
from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.documents import (
    CREATED,
    INDEX,
    MANIFEST,
    TRACE,
    TRACED,
    describe,
    digest_of,
    to_bytes,
    write_index,
)
from btrfs_ublk.image.first import push_trace
from btrfs_ublk.image.pack import unpack
from btrfs_ublk.image.pull import pull_image
from btrfs_ublk.image.reference import Reference, parse_reference
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.traces import MAX_BYTES, find_trace, parse_trace, placed
from btrfs_ublk.image.transfer import open_repository
from btrfs_ublk.units import KIB, MIB

place = made.place  # a fixture

UNIT, BLOCK = 256 * KIB, 4 * KIB


def trace_of(path: Path, root: str, size: int, *blocks: int) -> Trace:
    source = {"source": 7, "size": size, "unit": BLOCK, "root": root, "mirrors": []}
    lines: list[object] = [{"format": "btrfs-ublk trace", "version": 2}, source]
    lines += [[7, block, 1, at] for at, block in enumerate(blocks)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Trace.load(path)


def roots_of(pack: Path, work: Path) -> list[tuple[str, int, int]]:
    """Return root, place and size of each part of an image's data that is a source."""
    work.mkdir()
    header, digests = unpack(pack, work / "seed")
    if not header.sources:
        return [(header.root, 0, header.data_bytes)]
    return [
        (digests.part(x.offset, x.data_bytes).root, x.offset, x.data_bytes)
        for x in header.sources
    ]


@pytest.mark.parametrize("kind", ["sealed", "indexed"])
def test_a_trace_is_found_beside_an_image(place: Place, kind: str) -> None:
    if kind == "sealed":
        image = place.push("app", *some_layers())
    else:
        image = place.push_plain("app", *some_layers())
        place.index(image)
    target = parse_reference(image.name)
    before = ImageStore(place.path / "before")
    digest = pull_image(target, place.access, before).digest
    assert before.trace(digest) == []
    root, offset, size = roots_of(before.images()[0].pack, place.path / "work")[-1]
    path, last = place.path / "trace", (size - 1) // BLOCK
    with open_repository(target, place.access, writing=True) as repository:
        for blocks in ((0,), (last, 65, 64, 130, 131)):
            trace = trace_of(path, root, size, *blocks)
            pushed = push_trace(trace, target, repository)
        assert pushed.subject == digest and not pushed.left_out_bytes
        other = trace_of(path, "0" * 64, size, 1)
        with pytest.raises(UsageError, match="has read nothing of"):
            push_trace(other, target, repository)
    after = ImageStore(place.path / "after")
    assert pull_image(target, place.access, after).digest == digest
    end = (size - 1) // UNIT * UNIT
    assert after.trace(digest) == [
        [offset + end, size - end],
        [offset + UNIT, 2 * UNIT],
    ]
    stored = after.find(digest)
    assert stored is not None and stored.pack.read_bytes()


def test_an_image_that_was_built_with_a_trace_asks_for_none(place: Place) -> None:
    tree = place.path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(bytes(range(256)) * 4000)
    options = BuildOptions(first=[("a", 0, 4096)])
    built = build_image(tree, place.path / "built", options, tag="1")
    target = Reference(place.registry.host, "app", "1")
    made.push(place, built.name, target)
    store = ImageStore()
    pulled = pull_image(target, place.access, store)
    assert store.manifest(pulled.digest).traced
    (root, _, size), *_ = roots_of(store.images()[0].pack, place.path / "work")
    with open_repository(target, place.access, writing=True) as repository:
        push_trace(trace_of(place.path / "t", root, size, 0), target, repository)
    other = ImageStore(place.path / "other")
    pull_image(target, place.access, other)
    assert other.trace(pulled.digest) == []


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "in the manifest"])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[[4096,8192],[0,4096]]", [(4096, 8192), (0, 4096)]),
        (json.dumps([[0, MAX_BYTES + 4096]]), None),
        ("[[0,4096]]" + " " * (32 << 10), None),
        *((each, None) for each in ("[[0,1]]", "[[-4096,4096]]", "[[true,4096]]")),
        *((each, None) for each in ("", "{", "7", "[[0]]", "[" * 9000, '[["0",4096]]')),
        ("[[4611686018427387904,4096]]", None),
    ],
)
def test_what_the_registry_lists(
    text: str,
    found: list[tuple[int, int]] | None,
    listed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert parse_trace(text) == found
    annotations = {CREATED: "2026-01-02T00:00:00+00:00", TRACE: text}
    manifest = to_bytes({"schemaVersion": 2, "annotations": annotations})
    shown = annotations if listed else {CREATED: annotations[CREATED]}
    one = describe(MANIFEST, manifest, artifactType=TRACED, annotations=shown)
    older = describe(MANIFEST, b"older", artifactType=TRACED)
    index = write_index([one.raw, older.raw])

    def answer(request: str) -> bytes:
        if "/referrers/" in request:
            return response(f"200 OK\nContent-Type: {INDEX}", index)
        asked = manifest if one.digest in request else b"older"
        return response(f"200 OK\nContent-Type: {MANIFEST}", asked)

    with scripted_server(answer) as server:
        target = Reference(f"127.0.0.1:{server.port}", "app", "1")
        with open_repository(target, RegistryAccess(insecure=True)) as repository:
            assert find_trace(digest_of(b""), repository) == (found or [])
    assert ("is not valid" in caplog.text) == (found is None)


def test_extents_lie_in_sources() -> None:
    sources = [(3, 0, 2 * MIB), (4, 2 * MIB, MIB)]
    extents = [(MIB, 9 * MIB), (8 * MIB, 4096), (0, 4096), (0, 0)]
    assert placed(extents, sources) == [(3, MIB, MIB), (4, 0, MIB), (3, 0, 4096)]
