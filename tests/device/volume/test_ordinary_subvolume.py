"""What users see of a volume is an ordinary subvolume: everyday tools do not meet the
virtual file, and files have checksums unless they are clones of it.
"""

import errno
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.seeds import OLD_VIRTUAL_BYTES, unpack_old_seed

from btrfs_ublk.base.capabilities import BTRFS, BTRFS_PROGS, LOOP
from btrfs_ublk.base.process import run
from btrfs_ublk.base.readers import read_buffered
from btrfs_ublk.kernel import clone_file, loop_device
from btrfs_ublk.kernel.attributes import NO_COW, add_attributes, get_attributes
from btrfs_ublk.kernel.btrfs import reached_inode
from btrfs_ublk.physmap import PhysicalMap
from btrfs_ublk.seed import check_with_progs, inspect_seed
from btrfs_ublk.server import FrontEndName, PatternSegment
from btrfs_ublk.units import KIB, MIB, TIB
from btrfs_ublk.volume.sprout import sprout
from btrfs_ublk.volume.temporary import Volume, volume

CONTENTS = PatternSegment(offset=0, length=TIB)
TIMEOUT_S = 120


@pytest.fixture
def made(front_end: FrontEndName, need: Need, sparse_path: Path) -> Iterator[Volume]:
    need(BTRFS, LOOP, BTRFS_PROGS)
    target = sparse_path / "mnt"
    target.mkdir()
    with volume(
        target,
        [CONTENTS],
        virtual_data_size=TIB,
        parent=sparse_path,
        front_end=front_end,
    ) as it:
        yield it


def tool(*argv: str | Path) -> str:
    return run(argv, timeout_s=TIMEOUT_S).stdout


def fetched_bytes(made: Volume) -> int:
    kinds = made.server.stats().kinds
    return kinds["pattern"].read_bytes if "pattern" in kinds else 0


def sync(made: Volume) -> None:
    tool("sync", "--file-system", made.target)


def test_everyday_tools_do_not_meet_the_virtual_file(
    made: Volume, sparse_path: Path
) -> None:
    (made.target / "own").mkdir()
    (made.target / "own" / "file").write_bytes(os.urandom(100 * KIB))
    assert sorted(os.listdir(made.target)) == ["own"]
    archive = sparse_path / "all.tar"
    tool("tar", "-C", made.target, "-cf", archive, ".")
    with tarfile.open(archive) as tar:
        assert sorted(tar.getnames()) == [".", "./own", "./own/file"]
    used = int(tool("du", "--apparent-size", "-sb", made.target).split()[0])
    assert used < MIB
    tool("chown", "-R", "1:1", made.target)
    assert tool("find", made.target, "-size", "+1M") == ""
    tool("cp", "-a", made.target, sparse_path / "copy")
    content = (sparse_path / "copy/own/file").read_bytes()
    assert content == (made.target / "own/file").read_bytes()
    assert fetched_bytes(made) == 0
    # A snapshot is sent and received.
    (made.target / "file").write_bytes(os.urandom(100 * KIB))
    tool("btrfs", "subvolume", "snapshot", "-r", made.target, made.target / "snap")
    stream = made.target / "stream"
    tool("btrfs", "send", "-f", stream, made.target / "snap")
    assert stream.stat().st_size < MIB
    (made.target / "in").mkdir()
    tool("btrfs", "receive", "-f", stream, made.target / "in")
    assert sorted(os.listdir(made.target / "in/snap")) == ["file", "own"]
    content = (made.target / "in/snap/file").read_bytes()
    assert content == (made.target / "file").read_bytes()
    tool("btrfs", "subvolume", "delete", made.target / "snap")
    assert fetched_bytes(made) == 0
    # The subvolume can be mounted by hand beside the other one, from which it is not
    # removed.
    source = tool("findmnt", "-nvo", "SOURCE", made.target).strip()
    top = made.target.parent / "top"
    top.mkdir()
    tool("mount", "-o", "subvolid=5", source, top)
    try:
        names = sorted(os.listdir(top))
        done = subprocess.run(
            ["btrfs", "subvolume", "delete", top / "files"],
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    finally:
        tool("umount", top)
    assert names == [made.seed.virtual_data.filename, "files"]
    assert done.returncode != 0


@pytest.mark.data
def test_only_clones_lack_checksums_and_fetch_nothing(made: Volume) -> None:
    clone = made.clone("clone", offset=MIB, size_bytes=MIB)
    (made.target / "ordinary").write_text("ordinary")
    assert get_attributes(clone) & NO_COW
    assert not get_attributes(made.target / "ordinary") & NO_COW
    assert not get_attributes(made.target) & NO_COW
    directory = made.target / "copies"
    directory.mkdir()
    add_attributes(directory, NO_COW)
    tool("cp", "--reflink=always", clone, directory / "copy")
    tool("btrfs", "subvolume", "snapshot", made.target, made.target / "snap")
    sync(made)
    assert fetched_bytes(made) == 0
    for path in (clone, directory / "copy", made.target / "snap/clone"):
        assert path.read_bytes() == CONTENTS.content(MIB, MIB)
    assert fetched_bytes(made) > 0
    # All else can be compressed, and cloned.
    directory = made.target / "packed"
    directory.mkdir()
    tool("btrfs", "property", "set", directory, "compression", "zstd")
    (directory / "file").write_bytes(bytes(range(256)) * 4096)
    sync(made)
    assert "encoded" in tool("filefrag", "-v", directory / "file")
    tool("btrfs", "subvolume", "create", made.target / "sub")
    copy = made.target / "sub/file"
    tool("cp", "--reflink=always", directory / "file", copy)
    assert copy.read_bytes() == (directory / "file").read_bytes()


def test_quotas_charge_it_for_what_it_has(made: Volume) -> None:
    tool("btrfs", "quota", "enable", made.target)
    tool("btrfs", "quota", "rescan", "-w", made.target)
    (made.target / "file").write_bytes(os.urandom(MIB))
    sync(made)
    groups = {}
    for line in tool("btrfs", "qgroup", "show", "--raw", made.target).splitlines():
        words = line.split()
        if words and "/" in words[0] and words[0][0].isdigit():
            groups[words[0]] = int(words[1])
    assert groups["0/5"] >= TIB
    assert MIB <= groups["0/256"] < 2 * MIB
    tool("btrfs", "qgroup", "limit", "64M", made.target)
    (made.target / "more").write_bytes(os.urandom(MIB))
    sync(made)


@pytest.mark.data
def test_a_byte_that_has_rotted_is_noticed(made: Volume) -> None:
    path = made.target / "file"
    content = os.urandom(64 * KIB)
    path.write_bytes(content)
    assert not get_attributes(path) & NO_COW
    sync(made)
    (row,) = PhysicalMap.read(path)
    assert row.physical_offset is not None
    with made.sprout.writable.backing_file.open("r+b", buffering=0) as file:
        at = row.physical_offset + 5 * KIB
        byte = os.pread(file.fileno(), 1, at)
        assert byte == content[5 * KIB : 5 * KIB + 1]
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
    with pytest.raises(OSError) as caught:
        read_buffered(path, 4 * KIB, 4 * KIB)
    assert caught.value.errno == errno.EIO
    assert read_buffered(path, 0, 4 * KIB) == content[: 4 * KIB]


def test_a_seed_of_the_first_version(sparse_path: Path, need: Need) -> None:
    """Its virtual file is in the top directory, which new files inherit from."""
    need(BTRFS, LOOP)
    path = unpack_old_seed(sparse_path)
    assert check_with_progs(path).clean
    layout = inspect_seed(path)
    assert (layout["subvolumes"], layout["default_subvolume"]) == (1, 5)
    file = layout["virtual_data"]
    assert layout["new_files_nodatasum"] and file
    os.truncate(path, layout["device_bytes"])
    target = sparse_path / "mnt"
    target.mkdir()
    with (
        loop_device(path, read_only=True) as device,
        sprout(device.path, target, parent=sparse_path),
    ):
        assert os.listdir(target) == [file["filename"]]
        with reached_inode(target, file["inode"]) as virtual:
            assert virtual.stat().st_size == OLD_VIRTUAL_BYTES
            assert virtual.samefile(target / file["filename"])
            clone_file(virtual, target / "c", source_offset=MIB, size_bytes=5000)
        assert (target / "c").read_bytes() == bytes(5000)
