"""Directories and tars as models of images (csrc/image): read exactly, or refused."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import trees
from support.sanitized_build import run_sanitized
from support.trees import (
    ROOT,
    Member,
    describe,
    differences,
    directory,
    entry,
    link,
    names,
    tree_of,
)

TIMEOUT_S = 300
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes such trees")

Shell = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def shell(sanitized_build: Path) -> Shell:
    def run(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
        program = sanitized_build / "csrc/tests/image-shell"
        return run_sanitized(program, *words, statuses=range(99))

    return run


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory that takes attributes of any size, which not every disk's does."""
    path = Path(tempfile.mkdtemp(prefix="btrfs-ublk-tests-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def models(shell: Shell, *words: str | Path) -> list[dict[str, Any]]:
    done = shell(*words)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def refusal(shell: Shell, *words: str | Path) -> str:
    """The error; the sources give one, and nothing of the layer."""
    done = shell(*words)
    assert done.returncode == 1, (done.returncode, done.stderr.decode())
    assert done.stderr.startswith(b"image-shell: error: ")
    return done.stderr.decode().removeprefix("image-shell: error: ").strip()


@pytest.mark.data
@as_root
@pytest.mark.parametrize(
    ("entries", "links"),
    [(3000, 3000), pytest.param(100_000, 70_000, marks=pytest.mark.thorough)],
)
def test_a_directory_is_read_exactly(
    shell: Shell, in_memory: Path, entries: int, links: int
) -> None:
    tree = trees.make(in_memory / "tree", entries=entries, links=links)
    first, second = (shell(f"directory:{tree}") for _ in range(2))
    assert first.returncode == 0, first.stderr.decode()
    assert first.stdout == second.stdout
    model = json.loads(first.stdout)
    assert differences(describe(tree), tree_of(model)) == []
    (sparse,) = (inode for inode in model["inodes"] if inode["bytes"] == 8 * trees.TIB)
    assert sum(length for _, length in sparse["data"]["ranges"]) < 2**20


@pytest.mark.data
@as_root
@pytest.mark.parametrize(
    "form", ["pax", "pax-sparse", "gnu-sparse", "gzip", "zstd", "xz"]
)
def test_a_tar_is_read_exactly(shell: Shell, in_memory: Path, form: str) -> None:
    tree = trees.make(in_memory / "tree", links=50)
    if "sparse" not in form:
        for name in ("sparse-8T", "holes", "all-hole"):
            os.truncate(tree / "contents" / name, 5000)
    if form == "gnu-sparse":
        shutil.rmtree(tree / "attributes")  # which that format has not
    (tree / "special" / "socket").unlink()  # nor has any
    (tree / "links" / "fifo").unlink()  # nor has any, as a link
    tar = in_memory / "tar"
    create = ["tar", "--create", f"--file={tar}", "--xattrs", "--xattrs-include=*"]
    create += ["--numeric-owner", f"--directory={tree}"]
    if form == "gnu-sparse":
        create = [word for word in create if "xattrs" not in word]
    create += {
        "pax": ["--format=pax"],
        "pax-sparse": ["--format=pax", "--sparse"],
        "gnu-sparse": ["--format=gnu", "--sparse"],
    }.get(form, ["--format=pax", f"--{form}"])
    subprocess.run([*create, "."], check=True, timeout=TIMEOUT_S)
    source = describe(tree)
    if form == "gnu-sparse":  # whole seconds only
        source = {
            name: replace(node, mtime_ns=node.mtime_ns // 10**9 * 10**9)
            for name, node in source.items()
        }
    (model,) = models(shell, f"tar:{tar}")
    assert differences(source, tree_of(model)) == []
    if "sparse" in form:
        (sparse,) = (
            inode for inode in model["inodes"] if inode["bytes"] == 8 * trees.TIB
        )
        assert sum(length for _, length in sparse["data"]["ranges"]) < 2**20
    if form == "pax":
        digest = hashlib.sha256(tar.read_bytes()).hexdigest()
        assert model["diff_id"] == digest
        assert model["stream_bytes"] == tar.stat().st_size


@as_root
def test_labels_of_the_building_machine_are_left_out(
    shell: Shell, in_memory: Path
) -> None:
    file = in_memory / "tree" / "file"
    file.parent.mkdir()
    file.touch()
    os.setxattr(file, "security.capability", trees.CAPABILITY)
    for path in (file, file.parent):
        os.setxattr(path, "security.selinux", b"system_u:object_r:bin_t:s0\0")
    (model,) = models(shell, f"directory:{file.parent}")
    tree = tree_of(model)
    assert tree[b"."].xattrs == ()
    assert dict(tree[b"file"].xattrs) == {b"security.capability": trees.CAPABILITY}


@as_root
def test_acls_as_text(shell: Shell, in_memory: Path) -> None:
    """GNU tar's way of writing them, which has the mask in the mode."""
    header = Member("file")
    header.mode = 0o660
    header.pax_headers = {
        "SCHILY.acl.access": "user::rw-\nuser:1000:r--\nuser:100000:rwx\n"
        "group::r--\nmask::rw-\nother::---\n"
    }
    directory = Member("directory")
    directory.type = tarfile.DIRTYPE
    directory.mode = 0o755
    directory.pax_headers = {
        "SCHILY.acl.default": "user::rwx\ngroup::r-x\ngroup:44:rwx\nmask::rwx\n"
        "other::r-x\n"
    }
    (model,) = models(shell, f"tar:{make_tar(in_memory / 'tar', header, directory)}")
    tree = tree_of(model)
    assert dict(tree[b"file"].xattrs) == {b"system.posix_acl_access": trees.ACCESS_ACL}
    assert oct(tree[b"file"].mode) == oct(0o100660)
    assert dict(tree[b"directory"].xattrs) == {
        b"system.posix_acl_default": trees.DEFAULT_ACL
    }
    header.pax_headers = {"SCHILY.acl.access": "user::rw-\nuser:lena:r--\n"}
    said = refusal(shell, f"tar:{make_tar(in_memory / 'tar', header)}")
    assert '"file": an ACL names "lena", and no number of it' in said


def make_tar(path: Path, *headers: Member) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for header in headers:
            tar.addfile(header, io.BytesIO(header.content))
    return path


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([entry("../out")], '"../out": the name has a ".." in it'),
        ([entry("a/../../out")], '"a/../../out": the name has a ".." in it'),
        ([entry("/etc/passwd")], '"/etc/passwd": the name is absolute'),
        ([link("x", "/etc"), entry("x/passwd")], '"x/passwd": the symbolic link to'),
        ([link("x", "../.."), entry("x/out")], '"x/out": a symbolic link on the way'),
        ([link("a", "b"), link("b", "a"), entry("a/c")], '"a/c": more than 40'),
        ([entry("a"), entry("a/b")], '"a/b": "a" on the way is no directory'),
        ([link("a", "b", tarfile.LNKTYPE)], '"a": it is a hard link to "b", which is'),
        ([link("a", "../b", tarfile.LNKTYPE)], '"../b": the name has a ".." in it'),
        (
            [directory("d"), link("a", "d", tarfile.LNKTYPE)],
            '"a": a hard link cannot be one to a directory',
        ),
        ([entry(".")], '".": the top of the tree must be a directory'),
        ([entry("n" * 256)], "has 256 bytes, a name has at most 255"),
        ([link("l", "t" * 4096)], "target has 4096 bytes, it must have 1 to 4095"),
        ([entry("o", uid=2**32 - 1)], '"o": owner 4294967295:0'),
        (
            [entry("d", type=tarfile.CHRTYPE, devmajor=5000)],
            '"d": device 5000:0: at most is 4095:1048575',
        ),
    ],
)
def test_hostile_entries(
    shell: Shell, tmp_path: Path, headers: list[Member], said: str
) -> None:
    tar = make_tar(tmp_path / "tar", entry("before"), *headers)
    assert said in refusal(shell, f"tar:{tar}")


@pytest.mark.parametrize(
    ("headers", "there"),
    [
        ([directory("/"), entry("/ko-app/app")], {"ko-app", "ko-app/app"}),
        ([directory(".//"), entry("/./a")], {"a"}),
        ([entry("a/../b")], {"b"}),
        ([entry("../../out"), entry("a/../../b")], {"out", "b"}),
        # Names are shortened before links are followed, as each client does it.
        ([directory("d/e"), link("l", "d/e"), entry("l/../x")], {"d", "d/e", "l", "x"}),
        ([link("x", "../../d"), entry("x/in")], None),
        ([directory("d"), link("x", "../../d"), entry("x/in")], {"d", "x", "d/in"}),
        ([entry("f"), link("h", "///../f", tarfile.LNKTYPE)], {"f", "h"}),
        # A target's links are followed first, as containerd and umoci do it.
        (
            [
                entry("d/f"),
                directory("d/e"),
                link("l", "/d/e"),
                link("h", "/l/../f", tarfile.LNKTYPE),
            ],
            {"d", "d/e", "d/f", "l", "h"},
        ),
    ],
)
def test_names_of_a_layer_begin_at_the_top(
    shell: Shell, tmp_path: Path, headers: list[Member], there: set[str] | None
) -> None:
    layer = make_tar(tmp_path / "layer", *headers)
    if there is None:  # parents that are missing are made where the link leads
        there = {"x", "d", "d/in"}
    (model,) = models(shell, f"oci:{layer}")
    assert names(model) == there
    if "h" in there:
        assert len(tree_of(model)[b"h"].names) == 2


def test_a_name_that_comes_twice(shell: Shell, tmp_path: Path) -> None:
    tar = make_tar(
        tmp_path / "tar",
        directory("d", uid=1),
        entry("d/file"),
        entry("again", b"old"),
        link("hard", "again", tarfile.LNKTYPE),
        directory("d", uid=2),
        entry("again", b"newer"),
        directory("gone"),
        entry("gone/below"),
        entry("gone", b"file"),
    )
    (model,) = models(shell, f"tar:{tar}")
    tree = tree_of(model)
    assert sorted(tree) == [b".", b"again", b"d", b"d/file", b"gone", b"hard"]
    assert tree[b"d"].uid == 2
    assert (tree[b"again"].size, tree[b"hard"].size) == (5, 3)


def gzipped(path: Path) -> Path:
    subprocess.run(["gzip", "-9", path], check=True, timeout=TIMEOUT_S)
    return path.with_name(path.name + ".gz")


def test_truncated_and_damaged(shell: Shell, tmp_path: Path) -> None:
    tar = make_tar(
        tmp_path / "tar", entry("first", b"1" * 700), entry("file", os.urandom(50000))
    )
    whole = tar.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    digest = hashlib.sha256(whole).hexdigest()
    models(shell, f"oci={digest}:{tar}")
    said = refusal(shell, f"oci={'0' * 64}:{tar}")
    assert f"has the SHA-256 {digest} uncompressed, it should have 000000" in said
    for length in (1, 511, 512, 1000, 1536, 2048, end - 20000, end):
        tar.write_bytes(whole[:length])
        said = refusal(shell, f"tar:{tar}")
        assert "cut off" in said or "the tar is damaged" in said, (length, said)
    tar.write_bytes(whole)
    packed = gzipped(tar)
    content = packed.read_bytes()
    for length in (5, 30, len(content) // 2, len(content) - 4):
        packed.write_bytes(content[:length])
        refusal(shell, f"tar:{packed}")
    packed.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])
    refusal(shell, f"tar:{packed}")
    packed.write_bytes(b"")
    assert "the tar is an empty file" in refusal(shell, f"tar:{packed}")
    packed.write_bytes(b"this is no tar" * 100)
    assert "the tar is damaged" in refusal(shell, f"tar:{packed}")
    assert "No such file" in refusal(shell, f"tar:{tmp_path}/none")


def test_a_size_that_lies(shell: Shell, tmp_path: Path) -> None:
    """The next header is taken for content then, and the tar ends too early."""
    tar = make_tar(tmp_path / "tar", entry("liar", b"x" * 10), entry("b"))
    content = bytearray(tar.read_bytes())
    content[124:136] = b"77777777777\0"
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    tar.write_bytes(content)
    assert refusal(shell, f"tar:{tar}").startswith('"liar": the tar is damaged')


def test_bombs(shell: Shell, tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "tar", entry("zeros", bytes(20 << 20)))
    packed = gzipped(tar)
    assert packed.stat().st_size < 30000
    said = refusal(shell, "--max-bytes", str(10 << 20), f"tar:{packed}")
    assert said.startswith('"zeros": the tar has more than 10485760 bytes uncompressed')
    tar = make_tar(tmp_path / "many", *(entry(f"d/{i}") for i in range(100)))
    models(shell, "--max-inodes", "102", f"tar:{tar}")
    said = refusal(shell, "--max-inodes", "101", f"tar:{tar}")
    assert '"d/99": the image has more than 101 files and directories' in said


LOWER = [
    directory("d"),
    entry("d/one", b"1"),
    entry("d/two", b"2"),
    directory("d/sub"),
    entry("d/sub/deep", b"3"),
    entry("file", b"4"),
    link("other", "file", tarfile.LNKTYPE),
    link("to-d", "d"),
    link("to-root", "/d"),
]
LOWER_NAMES = {"d", "d/one", "d/two", "d/sub", "d/sub/deep", "file", "other"} | {
    "to-d",
    "to-root",
}


@pytest.mark.parametrize(
    ("upper", "gone", "new"),
    [
        ([entry("d/.wh.one")], {"d/one"}, set()),
        ([entry(".wh.file")], {"file"}, set()),
        ([entry(".wh.nothing"), entry("none/.wh.x")], set(), set()),
        ([entry(".wh.d")], {"d", "d/one", "d/two", "d/sub", "d/sub/deep"}, set()),
        (
            [entry("d/.wh..wh..opq"), entry("d/new")],
            {"d/one", "d/two", "d/sub", "d/sub/deep"},
            {"d/new"},
        ),
        # A whiteout is about what is below the layer, in whatever order they come.
        (
            [entry("d/new"), directory("d/sub"), entry("d/.wh..wh..opq")],
            {"d/one", "d/two", "d/sub/deep"},
            {"d/new"},
        ),
        (
            [entry("d/sub/new"), entry(".wh.d")],
            {"d/one", "d/two", "d/sub/deep"},
            {"d/sub/new"},
        ),
        ([entry("d", b"a file now")], {"d/one", "d/two", "d/sub", "d/sub/deep"}, set()),
        # Where other clients put these: the tree becomes the root directory.
        ([entry("to-d/x"), entry("to-root/y")], set(), {"d/x", "d/y"}),
        ([link("third", "file", tarfile.LNKTYPE)], set(), {"third"}),
        ([entry("/d/.wh.one"), entry("//./.wh.file")], {"d/one", "file"}, set()),
        ([entry("/.wh..wh..opq")], LOWER_NAMES, set()),
        # As a link of the tree is replaced, not followed, when it is named last.
        ([directory("to-d"), entry("to-d/in")], set(), {"to-d/in"}),
        ([entry(".wh..wh.plnk/123.4"), entry(".wh..wh.aufs")], set(), set()),
    ],
)
def test_layers(
    shell: Shell, tmp_path: Path, upper: list[Member], gone: set[str], new: set[str]
) -> None:
    layers = [
        make_tar(tmp_path / "lower", *LOWER),
        make_tar(tmp_path / "upper", *upper),
    ]
    first, second = models(shell, *(f"oci:{layer}" for layer in layers))
    assert names(first) == LOWER_NAMES
    assert names(second) == LOWER_NAMES - gone | new
    # What a layer leaves as it is keeps its inode number.
    before, after = (
        {tuple(map(tuple, inode["names"])): inode for inode in model["inodes"]}
        for model in (first, second)
    )
    if not gone and new == {"third"}:
        assert tree_of(second)[b"third"].names == (b"file", b"other", b"third")
    root = after[()]
    assert root["inode"] == before[()]["inode"] == ROOT


def test_layers_of_a_link_count(shell: Shell, tmp_path: Path) -> None:
    """One of several names goes, is replaced, comes again: the others stay."""
    layers = [
        make_tar(
            tmp_path / "1",
            entry("a", b"x"),
            *(link(f"l{i}", "a", tarfile.LNKTYPE) for i in range(5)),
        ),
        make_tar(tmp_path / "2", entry(".wh.l0"), entry("a", b"longer")),
        make_tar(tmp_path / "3", link("l0", "l1", tarfile.LNKTYPE), entry(".wh.l4")),
    ]
    last = models(shell, *(f"oci:{layer}" for layer in layers))[-1]
    tree = tree_of(last)
    assert tree[b"l0"].names == (b"l0", b"l1", b"l2", b"l3")
    assert tree[b"l0"].size == 1 and tree[b"a"].size == 6 and b"l4" not in tree


def test_changed_tars(sanitized_build: Path, tmp_path: Path) -> None:
    """Whatever is in a header: read or refused, without a crash, leak or hang."""
    odd = os.fsdecode(b"\xff" * 120)
    attributes = {"SCHILY.xattr.user.a": "1" * 600, "SCHILY.acl.access": "user::rw-"}
    tar = make_tar(
        tmp_path / "tar",
        *(*LOWER, entry(odd, b"5" * 1000, pax_headers=attributes)),
        *(entry("d/.wh..wh..opq"), entry(".wh.file"), link(odd + "2", odd)),
        *(entry("big", b"6" * 5000, mtime=-1.5), entry("x" * 200, uid=2**24)),
    )
    sparse = tmp_path / "sparse"
    with (tmp_path / "holes").open("wb") as file:
        for at in range(0, 60000, 9000):
            file.seek(at)
            file.write(b"7" * 100)
    create = ["tar", "--create", "--sparse", "--format=gnu", f"--file={sparse}"]
    subprocess.run([*create, f"--directory={tmp_path}", "holes"], check=True)
    fuzz = sanitized_build / "csrc/tests/fuzz-tar"
    run_sanitized(fuzz, "--iterations", 700, tar, sparse)
