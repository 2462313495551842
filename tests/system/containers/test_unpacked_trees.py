"""Layouts of images that many builders make, and odd ones: the tree that we make is the
one that a real containerd unpacks, and what it refuses, we refuse."""

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import compressed
from support.containers import CONTAINERD, is_containerd_2
from support.lazy_images import GZIP, PLAIN, ZSTD, image_of
from support.needs import Need
from support.processes import ending_with_us, stop
from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.trees import (
    Member,
    Tree,
    describe,
    differences,
    directory,
    entry,
    link,
    tree_of,
)
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import ROOT
from btrfs_ublk.image.pack import next_chain_id

TIMEOUT_S = 60
#: Nothing is collected while a tree is looked at.
_CONFIGURATION = """
version = 2
root = "{work}/root"
state = "{work}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{work}/socket"
[plugins."io.containerd.gc.v1.scheduler"]
  mutation_threshold = 1000000
  startup_delay = "1h"
"""
_FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"

Layers = list[tuple[str, bytes, bytes]]


class Containerd:
    """One of our own, that unpacks by copies: overlayfs would not show a layer what
    is below it, so symbolic links of lower layers would not be followed."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def ctr(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ctr", "--address", self.work / "socket", "--namespace", "n", *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def unpack(self, layout: Path, chain_id: str, name: str) -> Tree | str:
        """Return the tree, or why there is none."""
        archive = self.work / "image.tar"
        with tarfile.open(archive, "w") as file:
            file.add(layout, arcname=".")
        index = (
            f"sha256:{hashlib.sha256((layout / 'index.json').read_bytes()).hexdigest()}"
        )
        words = ["images", "import", "--no-unpack", "--index-name", f"x/{name}:1"]
        snapshots = ["snapshots", "--snapshotter", "native"]
        mounts = None
        for step in (
            [*words, archive],
            [*snapshots, "unpack", index],
            [*snapshots, "view", f"view-{name}", *([chain_id] if chain_id else [])],
            [*snapshots, "mounts", "/x", f"view-{name}"],
        ):
            mounts = self.ctr(*step)
            if mounts.returncode:
                return mounts.stderr
        assert mounts is not None
        (top,) = (x for x in mounts.stdout.split() if x.startswith(str(self.work)))
        return describe(Path(top))


@pytest.fixture(scope="module")
def containerd(need: Need, test_root: Path) -> Iterator[Containerd]:
    need(CONTAINERD, ROOT)
    if is_containerd_2():
        pytest.skip("its ctr unpacks by other commands")
    work = test_root / "reference"
    work.mkdir()
    (work / "config.toml").write_text(_CONFIGURATION.format(work=work))
    argv = ending_with_us(["containerd", "--config", str(work / "config.toml")])
    with open(work / "log", "wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        wait_until((work / "socket").exists, timeout_s=TIMEOUT_S)
        found = Containerd(work)
        # NB: `ctr snapshots unpack` takes no notice of --snapshotter (1.6).
        label = "containerd.io/defaults/snapshotter=native"
        for words in (["create", "n"], ["label", "n", label]):
            assert found.ctr("namespaces", *words).returncode == 0
        yield found
    finally:
        stop(process)
        subprocess.run(["rm", "-rf", work], check=True)


def tar(*members: Member, form: int = tarfile.PAX_FORMAT) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as file:
        for member in members:
            file.addfile(member, io.BytesIO(member.content))
    return made.getvalue()


def zipped(*tars: bytes) -> Layers:
    return [(GZIP, each, gzip.compress(each, mtime=0)) for each in tars]


def hard(name: str, target: str) -> Member:
    return link(name, target, tarfile.LNKTYPE)


BIG = bytes(range(256)) * 64
BASE = [directory("etc"), entry("etc/f", BIG), entry("etc/g"), directory("usr/lib")]
BASE += [entry("usr/lib/a"), link("lib", "usr/lib"), link("abs", "/usr/lib")]
BASE += [link("up", "../../../usr/lib")]
#: Ends with content, and has padding and an end behind it.
WHOLE = tar(entry("one", BIG), entry("two", BIG + b"tail"))
END = 512 + len(BIG) + 512 + len(BIG) + 4


def above(*members: Member) -> Layers:
    return zipped(tar(*BASE), tar(*members))


def layouts() -> dict[str, Layers]:
    base, empty = tar(*BASE), gzip.compress(b"", mtime=0)
    only = [tar(entry(f"only-{number}", BIG)) for number in range(8)]
    halves = [[each[:5000], each[5000:]] for each in only]
    comment = tarfile.TarInfo("x").create_pax_global_header({"comment": "x" * 40})
    null = {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}
    return {
        "ko": zipped(
            tar(directory("/"), directory("/ko-app/"), entry("/ko-app/app", BIG)),
            tar(directory("/var/run/ko/"), link("/var/run/ko/x", "/y")),
        ),
        "kaniko": above(
            directory("/"),
            directory("///etc"),
            entry("//etc/new", BIG),
            hard("/etc/again", "/etc/f"),
            entry("/etc/.wh.g"),
        ),
        "nix": zipped(
            tar(
                directory("./nix/store"),
                entry("./nix/store/abc", BIG, mode=0o444),
                link("./bin", "/nix/store"),
            )
        ),
        "buildpacks": zipped(
            tar(directory("/layers"), entry("/layers/java/x", BIG)),
            tar(directory("/workspace"), entry("/workspace/y")),
        ),
        "umoci-insert": zipped(WHOLE[:END]),
        "no-end": zipped(WHOLE[: END + 508]),
        "cut": zipped(WHOLE[: END - 3]),
        "dots": zipped(tar(entry("a/../b"), entry("c/../../d"), entry("../../f"))),
        "dots-behind-a-link": zipped(
            tar(directory("d/e"), link("l", "d/e"), entry("l/../x"))
        ),
        "link-up": above(entry("up/new")),
        "link-to-nothing": zipped(tar(link("x", "../../d"), entry("x/in"))),
        "hard-dots-behind-a-link": zipped(
            tar(entry("d/f"), directory("d/e"), link("l", "/d/e"), hard("h", "/l/../f"))
        ),
        "hard-behind-links": above(hard("h", "/abs/a"), hard("h2", "up/a")),
        "hard-to-a-link": above(hard("h", "/abs")),
        "hard-to-nothing": zipped(tar(hard("h", "/none"))),
        "whiteouts": above(entry("/etc/.wh.f"), entry("//./.wh.lib")),
        "whiteout-dots": above(entry("x/../etc/.wh.f"), entry("../.wh.lib")),
        "whiteout-behind-links": above(entry("abs/.wh.a")),
        "whiteout-of-dots": zipped(tar(entry(".wh.."))),
        "opaque": above(
            directory("etc"), entry("/etc/.wh..wh..opq"), entry("/etc/new")
        ),
        "opaque-late": above(entry("etc/new"), entry("etc/.wh..wh..opq")),
        "empty": [(PLAIN, b"", b""), *zipped(base)],
        "empty-gzip": [*zipped(base), (GZIP, b"", empty)],
        "zeroes": zipped(base, bytes(1024)),
        "only-empty": [(GZIP, b"", empty)],
        "no-layers": [],
        "gzip-and-zeroes": [
            (GZIP, only[0], gzip.compress(only[0], mtime=0) + bytes(512))
        ],
        "zeroes-between-members": [
            (GZIP, only[2], bytes(512).join(map(gzip.compress, halves[2])))
        ],
        "gzip-and-junk": [(GZIP, only[3], gzip.compress(only[3], mtime=0) + b"junk")],
        "frames": [(ZSTD, only[4], b"".join(map(compressed.zstd, halves[4])))],
        "foreign": [(_FOREIGN, only[6], gzip.compress(only[6], mtime=0))],
        "another": [(GZIP, only[7], gzip.compress(only[7][:-1], mtime=0))],
        "twice": zipped(
            tar(entry("a", b"1"), entry("a", b"22"), entry("b/c"), entry("b", b"3"))
        ),
        "file-over-directory": above(entry("etc", b"file")),
        "directory-over-file": above(directory("etc/f"), entry("etc/f/x")),
        "slashes": zipped(tar(directory("a//b/"), entry("a//b//c"), entry("././d"))),
        "pax-global": zipped(comment + base),
        "devices": zipped(
            tar(entry("dev/null", **null), entry("p", type=tarfile.FIFOTYPE))
        ),
        "bits": zipped(tar(entry("s", mode=0o4755), entry("t", mode=0o2755))),
        "below-a-file": zipped(tar(entry("f"), entry("f/x"))),
        "loop": zipped(tar(link("a", "b"), link("b", "a"), entry("a/c"))),
    }


def comparable(tree: Tree) -> Tree:
    """Without times of directories, which those have that are made on the way; modes of
    symbolic links, which Linux does not have; and the top, whose entry containerd
    passes over."""
    return {
        name: replace(
            node,
            mtime_ns=0 if stat.S_ISDIR(node.mode) else node.mtime_ns,
            mode=stat.S_IFLNK | 0o777 if stat.S_ISLNK(node.mode) else node.mode,
        )
        for name, node in tree.items()
        if name != b"."
    }


def ours(build: Path, layout: Path, layers: Layers) -> Tree | str:
    """What mkimage's sources make of the layers, or why there is nothing."""
    manifest = json.loads((layout / "index.json").read_bytes())["manifests"][0]

    def blob(digest: str) -> Path:
        return layout / "blobs" / digest.replace(":", "/")

    found = json.loads(blob(manifest["digest"]).read_bytes())["layers"]
    words = [
        f"oci={hashlib.sha256(tar).hexdigest()}:{blob(each['digest'])}"
        for each, (_, tar, _) in zip(found, layers, strict=True)
    ]
    done = subprocess.run(
        [build / "csrc/tests/image-shell", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    if done.returncode:
        assert done.returncode == 1, done.stderr
        return done.stderr
    return tree_of(json.loads(done.stdout.splitlines()[-1]))


#: What containerd says, and what we say.
REFUSALS = {
    "cut": ("unexpected EOF", "Truncated tar archive"),
    "zeroes-between-members": ("EOF", "Truncated tar archive"),
    "another": ("wrong diff id", "it should have"),
    "below-a-file": ("not a directory", "no directory"),
    "loop": ("too many links", "more than 40 symbolic links"),
    "whiteout-of-dots": ("invalid whiteout name", "a whiteout of"),
    "hard-to-nothing": ("no such file or directory", "which is not there"),
}


@pytest.mark.parametrize("name", layouts())
def test_the_tree_is_that_of_containerd(
    containerd: Containerd, sanitized_build: Path, sparse_path: Path, name: str
) -> None:
    layers = layouts()[name]
    layout = image_of(sparse_path / "layout", layers).path
    chain_id = ""
    for _, data, _ in layers:
        diff_id = f"sha256:{hashlib.sha256(data).hexdigest()}"
        chain_id = next_chain_id(chain_id or None, diff_id)
    theirs = containerd.unpack(layout, chain_id, name)
    if name in REFUSALS:
        they_say, we_say = REFUSALS[name]
        mine = ours(sanitized_build, layout, layers)
        assert isinstance(theirs, str) and they_say in theirs, theirs
        assert isinstance(mine, str) and we_say in mine, mine
        return
    assert not isinstance(theirs, str), theirs
    if not layers:
        assert comparable(theirs) == {}
        return
    mine = ours(sanitized_build, layout, layers)
    assert not isinstance(mine, str), mine
    assert differences(comparable(theirs), comparable(mine)) == []
