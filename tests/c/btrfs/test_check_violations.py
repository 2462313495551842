"""The offline check of seeds: each of its rules has a violation."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import seeds as fmt
from support.images import CHUNK_TREE, CSUM_TREE, HEADER, ROOT_TREE, Editor
from support.needs import Need
from support.paths import PROJECT
from support.seeds import GIB, KIB, MIB, TIB, mkseed

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.seed.check import check_seed, check_with_progs

START = 512 * GIB
STEP = 4 * GIB
INODE = 257
CHUNKS = [START + n * STEP for n in range(5)]
METADATA = 5 * MIB  # the metadata chunk of a small seed, which is 8 MiB long


pytestmark = pytest.mark.usefixtures("sanitized_helpers")


@pytest.fixture
def seed(sparse_path: Path) -> Path:
    """20 GiB in five chunks; all trees are one leaf each."""
    path = sparse_path / "seed.img"
    mkseed("--virtual-data-size=20G", "--chunk-size=4G", "--metadata-only", path)
    return path


def rules(path: Path) -> dict[str, str]:
    """The rules that are violated, with the first text of each."""
    report = check_seed(path)
    assert not report["clean"]
    assert report["violation_count"] >= len(report["violations"]) > 0
    found: dict[str, str] = {}
    for violation in report["violations"]:
        found.setdefault(violation["rule"], violation["text"])
    return found


Edit = Callable[[Editor], object]


def change_item(
    tree: int, key: tuple[int, int, int], layout: str, at: int, value: int
) -> Edit:
    def edit(image: Editor) -> None:
        with image.item(tree, key) as item:
            item.set(layout, at, value)

    return edit


def delete(tree: int, key: tuple[int, int, int]) -> Edit:
    return lambda image: image.delete(tree, key)


def insert(tree: int, key: tuple[int, int, int], data: bytes = b"") -> Edit:
    return lambda image: image.insert(tree, key, data)


def superblock(field: str, value: Any, **options: Any) -> Edit:
    return lambda image: image.set_super(field, value, **options)


def together(*edits: Edit) -> Edit:
    def edit(image: Editor) -> None:
        for one in edits:
            one(image)

    return edit


def split_extent(image: Editor) -> None:
    """Two extents in the second chunk."""
    start, half = CHUNKS[1], STEP // 2
    with image.items(fmt.FS_TREE) as items:
        old = next(i for i in items if i.key == (INODE, fmt.EXTENT_DATA, STEP))
        for at in (8, 29, 45):
            old.set("Q", at, half)
        new = bytearray(old.data)
        struct.pack_into("<Q", new, 21, start + half)
        items.insert(items.index(old) + 1, type(old)(old.key, new))
        items[items.index(old) + 1].key = (INODE, fmt.EXTENT_DATA, STEP + half)


def swap_extents(image: Editor) -> None:
    with image.items(fmt.FS_TREE) as items:
        one, two = (i for i in items if i.key[1:] in ((108, STEP), (108, 2 * STEP)))
        addresses = one.get("Q", 21), two.get("Q", 21)
        one.set("Q", 21, addresses[1])
        two.set("Q", 21, addresses[0])


def file_extent(number: int) -> tuple[int, int, int]:
    return INODE, fmt.EXTENT_DATA, number * STEP


def extent_item(number: int) -> tuple[int, int, int]:
    return CHUNKS[number], fmt.EXTENT_ITEM, STEP


def chunk_item(number: int) -> tuple[int, int, int]:
    return 256, fmt.CHUNK_ITEM, CHUNKS[number]


FILE = (INODE, fmt.INODE_ITEM, 0)
#: btrfs_name_hash of "default".
DEFAULT = (6, fmt.DIR_ITEM, 2378154706)
FS, EXTENTS, GROUPS = fmt.FS_TREE, fmt.EXTENT_TREE, fmt.BLOCK_GROUP_TREE

#: Of each rule: what its text has to contain, and what is done.
VIOLATIONS: dict[str, list[tuple[str, Edit]]] = {
    "superblock": [("WRITTEN is not set", superblock("flags", 1 << 32))],
    "superblock-mirror": [
        (
            "superblock at 67108864: the checksum is wrong",
            superblock("generation", 9, mirrors=(1,), csum=False),
        ),
        (
            "superblock at 274877906944: it differs",
            superblock("bytes_used", 0, mirrors=(2,)),
        ),
        ("the image ends before it, at 1073741824", lambda image: image.truncate(GIB)),
    ],
    "log-tree": [
        ("a log tree to replay, at 5242880", superblock("log_root", METADATA))
    ],
    "seeding": [("SEEDING is not set in flags 0x1", superblock("flags", 1))],
    "chunk-length": [
        (
            f"{STEP - 64 * KIB} bytes, no multiple of 4 GiB",
            change_item(CHUNK_TREE, chunk_item(4), "Q", 0, STEP - 64 * KIB),
        ),
        (
            "kernels since 6.4 refuse",
            together(
                superblock("total_bytes", 300 * TIB),
                superblock("dev_total_bytes", 300 * TIB),
                change_item(CHUNK_TREE, chunk_item(4), "Q", 0, 256 * TIB),
            ),
        ),
    ],
    "subvolume": [
        (
            "the default subvolume is 300, which does not exist",
            change_item(ROOT_TREE, DEFAULT, "Q", 0, 300),
        )
    ],
    "superblock-overlap": [
        (
            "in the place of the superblock at 274877906944",
            change_item(CHUNK_TREE, chunk_item(0), "Q", 56, 256 * GIB),
        )
    ],
    "layout": [("no file of virtual data", change_item(FS, FILE, "Q", 64, 1 << 6))],
    "virtual-file": [
        ("IMMUTABLE is not set", change_item(FS, FILE, "Q", 64, 1)),
        (
            "does not lead to inode 257",
            change_item(FS, (256, fmt.DIR_INDEX, 2), "Q", 0, 258),
        ),
    ],
    "virtual-file-extent": [
        ("not the whole", change_item(FS, file_extent(1), "Q", 45, STEP - 4096)),
        (
            "have a checksum",
            insert(CSUM_TREE, ((1 << 64) - 10, 128, CHUNKS[2] + 4096), bytes(4)),
        ),
    ],
    "virtual-file-cover": [
        (
            "its extents end at 21474836480",
            change_item(FS, FILE, "Q", 16, 21474836480 + 4096),
        ),
        ("the extents before it end at 8589934592", delete(FS, file_extent(2))),
    ],
    "virtual-file-order": [("does not follow", swap_extents)],
    "mapping": [
        (
            f"chunk at {CHUNKS[4]} is at {CHUNKS[4] - 65536} on the device",
            change_item(CHUNK_TREE, chunk_item(4), "Q", 56, CHUNKS[4] - 65536),
        ),
        ("not at", swap_extents),
    ],
    "extent-per-chunk": [
        ("has more than one extent", split_extent),
        (
            f"chunk at {CHUNKS[2]} has no extent of the virtual file",
            delete(FS, file_extent(2)),
        ),
        (
            "it begins at",
            together(
                change_item(FS, file_extent(4), "Q", 37, 4096),
                change_item(FS, file_extent(4), "Q", 45, STEP - 4096),
            ),
        ),
    ],
    "tree": [
        (
            "the address is in no chunk",
            change_item(ROOT_TREE, (5, fmt.ROOT_ITEM, 0), "Q", 176, 100 * GIB),
        ),
        (
            "higher than trees can be",
            change_item(ROOT_TREE, (7, fmt.ROOT_ITEM, 0), "B", 238, 9),
        ),
    ],
}


def test_the_list_has_every_rule() -> None:
    header = PROJECT / "csrc/btrfs/check/report.h"
    known = {
        line.split('"')[1]
        for line in header.read_text().splitlines()
        if line.startswith("#define RULE_")
    }
    # That one needs two copies, see test_a_copy_that_differs.
    assert known == VIOLATIONS.keys() | {"tree-block-copy"}


@pytest.mark.parametrize(
    ("rule", "text", "edit"),
    [(rule, *case) for rule, cases in VIOLATIONS.items() for case in cases],
)
def test_each_violation_is_named(seed: Path, rule: str, text: str, edit: Edit) -> None:
    with Editor(seed) as image:
        edit(image)
    report = check_seed(seed)
    assert not report["clean"]
    texts = [v["text"] for v in report["violations"] if v["rule"] == rule]
    assert any(text in found for found in texts), report["violations"]


#: What any btrfs has to keep, one for each kind of structure: ours does not look there.
OF_ANY_BTRFS: dict[str, Edit] = {
    "bytes used": superblock("bytes_used", 4096),
    "device": change_item(CHUNK_TREE, (1, fmt.DEV_ITEM, 1), "Q", 16, 4096),
    "device UUID": superblock("dev_uuid", lambda byte: byte ^ 1),
    "tree": delete(ROOT_TREE, (4, fmt.ROOT_ITEM, 0)),
    "device extent": delete(fmt.DEV_TREE, (1, fmt.DEV_EXTENT, CHUNKS[2])),
    "block group": delete(GROUPS, (CHUNKS[3], fmt.BLOCK_GROUP_ITEM, STEP)),
    "usage": change_item(GROUPS, (CHUNKS[3], fmt.BLOCK_GROUP_ITEM, STEP), "Q", 0, 8192),
    "extent": delete(EXTENTS, extent_item(2)),
    "reference": change_item(EXTENTS, extent_item(1), "Q", 24 + 1 + 8, 300),
    "count": change_item(EXTENTS, extent_item(1), "I", 24 + 1 + 24, 2),
    "free space": delete(fmt.FREE_SPACE_TREE, (CHUNKS[3], fmt.FREE_SPACE_INFO, STEP)),
    "subvolume": delete(ROOT_TREE, (5, fmt.ROOT_REF, 256)),
}


@pytest.mark.parametrize("structure", OF_ANY_BTRFS)
def test_btrfs_check_finds_the_rest(seed: Path, need: Need, structure: str) -> None:
    need(BTRFS_PROGS)
    with Editor(seed) as image:
        OF_ANY_BTRFS[structure](image)
    assert check_with_progs(seed).clean is False


ALL_TREES = [1, 2, 4, 5, 7, 9, 10, 11, (1 << 64) - 9]


@pytest.mark.parametrize("tree", ALL_TREES)
def test_a_wrong_checksum_in_any_tree_is_found(seed: Path, tree: int) -> None:
    with Editor(seed) as image:
        bytenr = image.roots[tree]
        with image.block(bytenr, csum=False) as block:
            block[16000 % len(block)] ^= 0x10
    assert f"leaf at {bytenr}: the checksum is wrong" in rules(seed)["tree"]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("fsid", 0xEE, "its fsid is not that of the file system"),
        ("bytenr", 4096, "its header says 4096"),
        ("nritems", 100000, "it claims 100000 items"),
        ("level", 1, "its level is 1, not 0"),
    ],
)
def test_a_wrong_header_is_found(seed: Path, field: str, value: int, text: str) -> None:
    assert field in HEADER
    with Editor(seed) as image:
        image.set_header(fmt.FS_TREE, field, value)
    assert text in rules(seed)["tree"]


def test_wrong_leaves_are_found(seed: Path) -> None:
    with Editor(seed) as image:
        with image.items(fmt.FS_TREE) as items:
            items[3], items[4] = items[4], items[3]
        leaf = image.roots[fmt.FS_TREE]
    assert f"file tree, leaf at {leaf}, item 4: key (" in rules(seed)["tree"]
    with Editor(seed) as image:
        with image.items(fmt.FS_TREE) as items:
            items[3], items[4] = items[4], items[3]
        with image.block(leaf) as block:
            struct.pack_into("<I", block, 101 + 25 * 2 + 21, 60000)
    text = rules(seed)["tree"]
    assert f"leaf at {leaf}, item 2: data ends beyond the block" in text


def test_a_copy_that_differs(sparse_path: Path) -> None:
    path = sparse_path / "seed.img"
    mkseed(
        *("--virtual-data-size=4G", "--metadata-profile=dup"),
        *("--metadata-only", path),
    )
    with path.open("r+b") as file:
        file.seek(5 * MIB + 500)  # the second copy of the chunk tree
        assert file.read(1) == b"\0"
        file.seek(5 * MIB + 500)
        file.write(b"\1")
    assert "copy 2, 5242880 on the device, differs" in rules(path)["tree-block-copy"]


def test_nodes_are_held_against_their_children(sparse_path: Path) -> None:
    """In trees of two levels: keys, generations, and a child that occurs twice."""
    path = sparse_path / "seed.img"
    big = ("--virtual-data-size=4T", "--chunk-size=4G", "--metadata-only", "--force")
    second = 101 + 33  # the second pointer: a key of 17 bytes, address, generation
    for at, value, text in (
        (9, 7, "belongs behind the block, whose successor begins with"),
        (17, 4097, "4097 is not the address of a block"),
        (25, 3, "its generation is 1, the pointer to it says 3"),
    ):
        mkseed(*big, path)
        with Editor(path) as image:
            with image.block(image.roots[fmt.FS_TREE]) as block:
                assert block[100] == 1
                struct.pack_into("<Q", block, second + at, value)
        assert text in rules(path)["tree"]
    mkseed(*big, path)
    with Editor(path) as image:
        with image.block(image.roots[fmt.FS_TREE]) as block:
            block[101 + 17 : 101 + 25] = block[second + 17 : second + 25]
    assert "its first key is" in rules(path)["tree"]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("nodesize", 12345, "nodesize"),
        ("csum_type", 9, "checksum type"),
        ("array_size", 9999, "sys_chunk_array_size"),
        ("array", 9, "sys_chunk_array, entry at 0"),
        ("chunk_root", 0, "chunk_root"),
        ("total_bytes", (1 << 64) - 1, "total_bytes"),
    ],
)
def test_what_cannot_be_read_is_one_violation(
    seed: Path, field: str, value: int, text: str
) -> None:
    with Editor(seed) as image:
        image.set_super(field, value)
    report = check_seed(seed)
    assert report["violation_count"] == 1
    assert report["violations"][0]["rule"] == "superblock"
    assert text in report["violations"][0]["text"]
