"""Studies that measure what this machine can do: all of their rows, once."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.images import tagged_image
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Capability, Program
from btrfs_ublk.base.process import run
from btrfs_ublk.bench import containers, fetching, image_start, sandboxes
from btrfs_ublk.bench.bed import CURL, OPENSSL
from btrfs_ublk.bench.image_peers import PEERS
from btrfs_ublk.bench.image_start import EROFS, UNTAR
from btrfs_ublk.bench.origin import NGINX
from btrfs_ublk.bench.report import Document
from btrfs_ublk.image import BuildOptions, build_image
from btrfs_ublk.testing.registry import REGISTRY
from btrfs_ublk.units import KIB, MIB

BUSYBOX = Program("busybox", package="busybox-static")
LARGE_BYTES = 512 * KIB
pytestmark = pytest.mark.device


def measured(
    name: str, *words: str | Path, needs: tuple[Capability, ...] = ()
) -> Document:
    for capability in needs:
        if capability.probe():
            pytest.skip(f"{capability.name}: {capability.probe()}")
    argv = [sys.executable, "-m", f"btrfs_ublk.bench.{name}", "--json", *words]
    document: Document = json.loads(run(argv, timeout_s=240).stdout)
    return document


def test_sandboxes(sparse_path: Path) -> None:
    words = ("--forks=3", "--files=20", "--repeats=1", f"--directory={sparse_path}")
    document = measured("sandboxes", *words, needs=(sandboxes.EROFS,))
    (table,) = sandboxes.tables(document)
    assert [row[0] for row in table.rows] == list(sandboxes.SUBJECTS)
    lists = [row[table.columns.index("list")] for row in table.rows]
    assert [x == "-" for x in lists] == [False, False, True, True, True]


def test_containers(sparse_path: Path) -> None:
    pytest.importorskip("grpc")
    words = ("--repeats=2", f"--directory={sparse_path}")
    document = measured("containers", *words, needs=(containers.CONTAINERD,))
    (table,) = containers.tables(document)
    pairs = [tuple(row[:2]) for row in table.rows]
    assert len(pairs) == 3 * (len(containers.CALLS) + 1) == len(set(pairs))
    assert {row[2] for row in table.rows} == {"2"}


def test_all_that_needs_no_delay(tmp_path: Path) -> None:
    """Each kind of reading that this machine can do is measured once."""
    chosen = ("random", "warm", "sequential", "readers")
    words = ["--size=8M", "--runtime=0.2", "--repeats=1", f"--disk={tmp_path}"]
    words += [f"--what={what}" for what in chosen]
    document = measured("fetching", *words, needs=(NGINX, CURL, OPENSSL))
    document["results"].sort(key=lambda result: chosen.index(result["what"]))
    for name, table in zip(chosen, fetching.tables(document)):
        assert table.title == fetching.KINDS[name]["title"]
        assert len(table.rows) == len(fetching.cases(name, 0.2))


@pytest.mark.timing  # what a lazy image fetches of itself meanwhile depends on time
def test_what_starts_move(need: Need, sparse_path: Path) -> None:
    made = (image_start.EROFS_DRIVER, image_start.MKFS_EROFS, image_start.SKOPEO)
    need(ROOT, BTRFS, LOOP, *made, REGISTRY, CURL, image_start.PIGZ, BUSYBOX)
    tree, tar = sparse_path / "tree", sparse_path / "tree.tar"
    (tree / "bin").mkdir(parents=True)
    subprocess.run(["cp", f"/bin/{BUSYBOX.name}", tree / "bin/true"], check=True)
    with (tree / "large").open("wb") as file:
        for _ in range(8):
            file.write(Path("/dev/urandom").open("rb").read(LARGE_BYTES))
    subprocess.run(["tar", "-cf", tar, "-C", tree, "."], check=True)
    peers = [
        name
        for name, peer in PEERS.items()
        if not any(each.probe() for each in peer.needs)
    ]
    chosen = [*image_start.DEFAULTS, *peers]
    words = [f"--tree={tar}", f"--directory={sparse_path}", "--run=/bin/true"]
    words += ["--repeats=1", "--far", "2", "800", *(f"--subject={x}" for x in chosen)]
    document = measured("image_start", *words)
    found = {each["subject"]: each for each in document["results"]}
    assert sorted(found) == sorted(chosen)
    assert UNTAR in found and EROFS in found
    for name in (EROFS, "image, API", *peers):
        assert found[name]["memory_bytes"] > MIB, name
    assert found[UNTAR]["requests"] == 3
    assert found[UNTAR]["bytes"] > 8 * LARGE_BYTES
    # Of a start, the large file is no part.
    for name, each in found.items():
        assert each["seconds"] > each["limit_s"]
        assert each["bytes"] < found[UNTAR]["bytes"] / 2 or "image" not in name
    (table,) = image_start.tables(document)
    assert len(table.rows) == len(chosen)


@pytest.mark.timing  # as above
def test_starts_of_an_image_of_many_layers(need: Need, sparse_path: Path) -> None:
    need(ROOT, BTRFS, LOOP, image_start.EROFS_DRIVER, REGISTRY, CURL)
    need(containers.CONTAINERD, image_start.PIGZ, BUSYBOX)
    program = Path(f"/bin/{BUSYBOX.name}").read_bytes()
    large = [random.Random(each).randbytes(8 * LARGE_BYTES) for each in range(3)]
    layers = [{f"large{each}": content} for each, content in enumerate(large)]
    layers += [{".wh.large0": b""}, {"bin/busybox": program}]
    layout = sparse_path / "layout"
    name = tagged_image(sparse_path / "ordinary", *layers)
    build_image(name, layout, BuildOptions(), tag="plain")
    chosen = [UNTAR, image_start.PULLED, "image, API"]
    words = [f"--layout={layout}", f"--directory={sparse_path}", "--repeats=1"]
    words += ["--run=/bin/busybox test -s /large1", "--far", "2", "800"]
    words += [f"--subject={each}" for each in chosen]
    document = measured("image_start", *words)
    found = {each["subject"]: each for each in document["results"]}
    assert set(found) == set(chosen)
    for each in (UNTAR, image_start.PULLED):
        assert found[each]["bytes"] > 3 * 8 * LARGE_BYTES
    assert found["image, API"]["bytes"] < 8 * LARGE_BYTES
