"""From a tree to a sealed image, a registry, and a mounted fork, by the commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.registry import REGISTRY, registry_server
from support.volumes import NAME, Place, image_place

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, Helper
from btrfs_ublk.base.helpers import MKIMAGE
from btrfs_ublk.base.process import run


@pytest.fixture(autouse=True)
def helper(need: Need) -> None:
    need(Helper(MKIMAGE))


def tree(path: Path) -> Path:
    """Make a tree of several kinds of entries."""
    (path / "etc").mkdir(parents=True)
    (path / "etc/os-release").write_text("ID=test\n")
    (path / "big").write_bytes(os.urandom(3_000_000))
    (path / "zeroes").write_bytes(bytes(200_000))
    os.link(path / "big", path / "etc/same")
    (path / "link").symlink_to("etc/os-release")
    os.utime(path / "big", ns=(1, 1_234_567_890_123_456_789))
    (path / "etc").chmod(0o750)
    return path


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    need(ROOT, BTRFS, LOOP, FUSE)
    found = image_place(sparse_path, monkeypatch)
    yield found
    found.take_all_down()


def listing(path: Path) -> list[list[str]]:
    """Return all entries of a tree with their attributes and checksums."""
    done = run(
        ["sh", "-c", 'cd "$1" && find . -printf "%p %y %m %s %T@ %n %l\\n" | sort'
         ' && find . -type f -print0 | sort -z | xargs -0 sha256sum', "sh", path],
        timeout_s=60.0,
    )  # fmt: skip
    rows = [line.split(" ") for line in done.stdout.splitlines()]
    # Size and links of a directory are its file system's matter.
    return [row if row[1] != "d" else row[:3] + row[4:5] for row in rows]


@pytest.mark.fuse
@pytest.mark.usefixtures("in_process")
def test_from_a_tree_to_a_registry_to_a_fork(
    place: Place, need: Need, tmp_path: Path
) -> None:
    need(REGISTRY)
    source = tree(place.root / "tree")

    def image(*words: object) -> str:
        done = place.command(*words, noun="image")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    with registry_server(tmp_path, tls=True) as server:
        ca = ("--ca-file", server.ca_file)
        name = f"{server.host}/some/app"
        layout = image("build", source, "-o", place.root / "layout")
        pushed = image("push", layout, f"{name}:1", *ca)
        assert image("pull", pushed, *ca).startswith(f"{name}@sha256:")
        mount = image(
            *("up", pushed, NAME, *ca, "--mount", place.target, "--writable=256M")
        )
        assert mount == str(place.target)
        assert listing(place.target / "rootfs/") == listing(source)
        fork = Path(image("fork", NAME, "one"))
        with open(fork / "big", "r+b") as file:
            file.write(b"changed")
        image("down", NAME)
        done = place.command("up", NAME)
        assert done.returncode == 0, done.stderr
        assert (fork / "big").read_bytes()[:9] == b"changed" + (
            source / "big"
        ).read_bytes()[7:9]
        assert listing(place.target / "rootfs/") == listing(source)
        image("down", NAME)
