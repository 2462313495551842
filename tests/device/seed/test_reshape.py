"""btrfs-ublk-reshape: what it changes, what it refuses, and what damage does."""

import fcntl
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import seeds as fmt
from support.needs import Need, share_of
from support.seeds import (
    BLOCK,
    DEVICE,
    FILENAME,
    GIB,
    NODE,
    RESHAPED_BYTES,
    SEEDING,
    START,
    Reshape,
    allocate,
    btrfs_check,
    copy_sparse,
    extent_types,
    make_btrfs,
    make_preallocated,
    mounted_image,
    read_at,
    tree_blocks,
    with_checksum,
    write_at,
)

from btrfs_ublk.base.capabilities import BTRFS, BTRFS_PROGS, LOOP, MKFS_BTRFS, ROOT
from btrfs_ublk.base.helpers import RESHAPE
from btrfs_ublk.base.process import run
from btrfs_ublk.kernel import loop_device, mounted

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def reshape(sanitized_build: Path) -> Reshape:
    return Reshape(sanitized_build / "csrc" / "tools" / RESHAPE)


@pytest.fixture(scope="module")
def originals(
    need: Need, test_root: Path, reshape: Reshape
) -> Iterator[tuple[Path, Path]]:
    """A preallocated image, and the seed made of it; not to be changed."""
    need(ROOT, BTRFS, LOOP, MKFS_BTRFS, BTRFS_PROGS)
    directory = test_root / "reshape"
    directory.mkdir()
    before = make_preallocated(directory / "before.img", reshape)
    after = copy_sparse(before, directory / "after.img")
    reshape.seed(after)
    yield before, after
    shutil.rmtree(directory)


@pytest.fixture
def image(originals: tuple[Path, Path], sparse_path: Path) -> Path:
    """A copy of the preallocated image."""
    return copy_sparse(originals[0], sparse_path / "image")


def difference(one: Path, other: Path) -> dict[int, tuple[bytes, bytes]]:
    """The 4 KiB blocks that differ, by offset."""
    zero = bytes(BLOCK)
    left, right = dict(fmt.data_bytes(one)), dict(fmt.data_bytes(other))
    return {
        offset: (left.get(offset, zero), right.get(offset, zero))
        for offset in sorted(left.keys() | right.keys())
        if left.get(offset) != right.get(offset)
    }


class TestSeed:
    def test_extents_become_regular_and_nothing_else_changes(
        self, originals: tuple[Path, Path]
    ) -> None:
        before, after = originals
        btrfs_check(after)
        assert extent_types(before) == [2] * (RESHAPED_BYTES // (256 << 20))
        assert extent_types(after) == [1] * (RESHAPED_BYTES // (256 << 20))
        leaves = {b.bytenr for b in tree_blocks(after).values() if b.owner == 5}
        flipped = 0
        for offset, (old, new) in difference(before, after).items():
            changes = [at for at in range(BLOCK) if old[at] != new[at]]
            if offset in fmt.SUPER_OFFSETS:
                assert set(changes) <= {0, 1, 2, 3, 60}  # checksum, flags
                continue
            leaf = offset // NODE * NODE
            assert leaf in leaves
            if offset == leaf:
                changes = [at for at in changes if at >= 4]
            assert all((old[at], new[at]) == (2, 1) for at in changes)
            flipped += len(changes)
        assert flipped == len(extent_types(after))
        with after.open("rb") as file:
            reader = fmt.Image(file)
            for offset in fmt.SUPER_OFFSETS:
                assert reader.read_super(offset).flags == 1 | SEEDING

    def test_run_again_it_changes_nothing(
        self, originals: tuple[Path, Path], image: Path, reshape: Reshape
    ) -> None:
        reshape.seed(image)
        reshape.seed(image)
        assert difference(image, originals[1]) == {}

    def test_a_killed_run_is_completed(
        self, originals: tuple[Path, Path], sparse_path: Path, reshape: Reshape
    ) -> None:
        """Writes come in the order of the tree, then superblocks in that of mirrors;
        each state in between is made from the two images, pages torn included.
        """
        before, after = originals
        changed = difference(before, after)
        leaves = sorted({offset // NODE * NODE for offset in changed if offset % NODE})
        leaves = [leaf for leaf in leaves if leaf not in fmt.SUPER_OFFSETS]
        pages = [leaf + page for leaf in leaves for page in range(0, NODE, BLOCK)]
        pages += fmt.SUPER_OFFSETS
        assert len(leaves) >= 3 and set(changed) <= set(pages)
        image = copy_sparse(before, sparse_path / "image")
        for done in range(len(pages) + 1):
            state = copy_sparse(image, sparse_path / "state")
            reshape.seed(state)
            assert difference(state, after) == {}, f"after {done} pages"
            state.unlink()
            if done < len(pages):
                page = pages[done]
                write_at(image, page, read_at(after, page, BLOCK))

    def test_no_stale_copy_is_left(
        self, need: Need, sparse_path: Path, reshape: Reshape
    ) -> None:
        """With two copies of the metadata, a killed run may have written one of them.
        The stale one has a valid checksum, and says that files are zeroes."""
        need(ROOT, BTRFS, LOOP, MKFS_BTRFS, BTRFS_PROGS)
        before = make_btrfs(sparse_path / "b", "-m", "dup", size_bytes=2 * GIB)
        with mounted_image(before) as target:
            allocate(target / FILENAME, 600 << 20)
        after = copy_sparse(before, sparse_path / "after")
        reshape.seed(after)
        btrfs_check(after)
        changed = [x for x in difference(before, after) if x not in fmt.SUPER_OFFSETS]
        pages = [at for at in changed if at % BLOCK == 0]
        leaves = sorted({at // NODE * NODE for at in pages})
        assert len(leaves) == 2
        places = [range(leaf, leaf + NODE, BLOCK) for leaf in leaves]
        supers = fmt.SUPER_OFFSETS[:2]
        for order in (places, places[::-1]):
            image = copy_sparse(before, sparse_path / "image")
            for page in (*order[0], *order[1], *supers, None):
                state = copy_sparse(image, sparse_path / "state")
                reshape.seed(state)
                assert difference(state, after) == {}, f"before {page}"
                state.unlink()
                if page is not None:
                    write_at(image, page, read_at(after, page, BLOCK))
            # It may have got as far as the superblocks without the second copy.
            write_at(image, order[1][0], read_at(before, order[1][0], NODE))
            reshape.seed(image)
            assert difference(image, after) == {}
            image.unlink()

    def test_a_torn_leaf_is_told_from_a_damaged_one(
        self, originals: tuple[Path, Path], image: Path, reshape: Reshape
    ) -> None:
        leaf = min(b.bytenr for b in tree_blocks(image).values() if b.owner == 5)
        torn = read_at(originals[1], leaf, BLOCK) + read_at(
            image, leaf + BLOCK, NODE - BLOCK
        )
        write_at(image, leaf, torn[:-1] + bytes([torn[-1] ^ 1]))
        assert "checksum" in reshape.refused(image)


def _snapshot(target: Path) -> None:
    run(["btrfs", "subvolume", "snapshot", target, target / "s"], timeout_s=30)


def _removed_snapshot(target: Path) -> None:
    _snapshot(target)
    run(["btrfs", "subvolume", "delete", "-c", target / "s"], timeout_s=30)
    run(["btrfs", "subvolume", "sync", target], timeout_s=30)


def _hole(target: Path) -> None:
    run(["fallocate", "-p", "-o", "1G", "-l", "4096", target / FILENAME], timeout_s=30)


def _longer(target: Path) -> None:
    os.truncate(target / FILENAME, RESHAPED_BYTES + GIB)


#: What is done to the mounted image, and why it is refused then.
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "snapshot": (_snapshot, "there has been a snapshot"),
    "removed snapshot": (_removed_snapshot, "snapshot"),
    "hole": (_hole, "hole"),
    "longer than its extents": (_longer, "its extents end at"),
    "removed": (lambda target: (target / FILENAME).unlink(), "no inode 257"),
}


class TestRefusals:
    @pytest.mark.parametrize("what", REFUSED)
    def test_what_is_no_virtual_file(
        self, image: Path, reshape: Reshape, what: str
    ) -> None:
        change, reason = REFUSED[what]
        with mounted_image(image) as target:
            change(target)
        assert reason in reshape.refused(image)

    def test_a_log_tree(self, image: Path, sparse_path: Path, reshape: Reshape) -> None:
        with mounted_image(image) as target:
            with (target / "file").open("wb", buffering=0) as file:
                # NB: where a chunk was made, all is committed and nothing logged.
                file.write(b"x" * 5000)
                os.sync()
                file.write(b"x" * 5000)
                os.fsync(file.fileno())
                dirty = copy_sparse(image, sparse_path / "dirty")
        assert "log tree" in reshape.refused(dirty)

    def test_what_is_in_use(self, image: Path, reshape: Reshape) -> None:
        target = image.with_name("mount")
        target.mkdir()
        with loop_device(image) as loop:
            assert f"{loop.path} is on it" in reshape.refused(image)
            with mounted(loop.path, target):
                done = reshape("seed", "--inode=257", image)
                assert f"{loop.path} is on it" in done.stderr
                assert "mounted" in reshape.refused(loop.path)
        with image.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert "locked" in reshape.refused(image)
        reshape.seed(image)

    def test_a_foreign_image(self, sparse_path: Path, reshape: Reshape) -> None:
        path = sparse_path / "image"
        for content in (b"", random.Random(1).randbytes(4 << 20)):
            path.write_bytes(content)
            assert "superblock" in reshape.refused(path)


class TestDamage:
    """An error that names the structure; never a crash, a hang or a change."""

    def refusal_of(self, image: Path, reshape: Reshape) -> str | None:
        done = reshape("seed", "--inode=257", "--dry-run", image)
        assert done.returncode in (0, 2), (done.returncode, done.stderr)
        if done.returncode == 0:
            return None
        assert str(image) in done.stderr and len(done.stderr.splitlines()) <= 2
        return done.stderr

    def test_truncated(self, image: Path, reshape: Reshape) -> None:
        chances = random.Random(2)
        ends = [0, 1, 65536, 65536 + 4095, 65536 + 4096, (1 << 20) + 1, START]
        ends += [chances.randrange(1 << 20, 16 << 20) for _ in range(10)]
        for end in sorted(ends, reverse=True):
            os.truncate(image, end)
            refusal = self.refusal_of(image, reshape)
            # What comes after the last superblock is virtual.
            assert (refusal is None) == (end >= 256 * GIB + 4096), (end, refusal)

    def test_every_flipped_bit_is_noticed(self, image: Path, reshape: Reshape) -> None:
        chances = random.Random(3)
        structures = [(65536, 4096), *((at, NODE) for at in tree_blocks(image))]
        for _ in range(share_of(100, least_percent=25)):
            start, length = chances.choice(structures)
            offset = start + chances.randrange(length)
            old = read_at(image, offset, 1)
            write_at(image, offset, bytes([old[0] ^ 1 << chances.randrange(8)]))
            refusal = self.refusal_of(image, reshape)
            owner = tree_blocks_owner(image, start) if start != 65536 else None
            # Blocks of trees that say nothing about files are not looked at.
            assert refusal or owner not in (None, 1, 2, 3, 5), hex(offset)
            write_at(image, offset, old)
        assert self.refusal_of(image, reshape) is None

    def test_nonsense_with_a_good_checksum(self, image: Path, reshape: Reshape) -> None:
        """What a checksum does not catch: any bytes, anywhere in what is in use."""
        chances = random.Random(4)
        structures = [(65536, 4096)] * 8
        structures += [(at, NODE) for at in tree_blocks(image)]
        refused = 0
        rounds = share_of(200, least_percent=20)
        for _ in range(rounds):
            start, length = chances.choice(structures)
            old = read_at(image, start, length)
            block = bytearray(old)
            for _ in range(chances.choice([1, 1, 1, 3])):
                # Headers and items stand at the front, their data at the end.
                at = chances.choice(
                    [chances.randrange(32, 600), -chances.randrange(1, 2000)]
                )
                value = chances.choice([0, 1, 0x7F, 0xFF, chances.randrange(256)])
                block[at] = value
            write_at(image, start, with_checksum(block))
            refused += self.refusal_of(image, reshape) is not None
            write_at(image, start, old)
        assert refused > rounds // 4
        assert self.refusal_of(image, reshape) is None


def tree_blocks_owner(image: Path, bytenr: int) -> int:
    owner: int = struct.unpack("<Q", read_at(image, bytenr + 88, 8))[0]
    return owner


class TestStretch:
    def stretch(
        self, reshape: Reshape, image: Path, offset: int, length: int
    ) -> tuple[int, str]:
        done = reshape("stretch", f"--offset={offset}", f"--length={length}", image)
        return done.returncode, done.stderr

    def test_a_new_file_system_stays_whole(
        self, originals: None, sparse_path: Path, reshape: Reshape
    ) -> None:
        image = make_btrfs(sparse_path / "image", "-L", "label")
        assert self.stretch(reshape, image, START, RESHAPED_BYTES) == (0, "")
        btrfs_check(image)
        with mounted_image(image) as target:
            assert os.statvfs(target).f_blocks * BLOCK == DEVICE
            (target / "file").write_bytes(b"data" * 1000)
            allocate(target / "large", 100 * GIB)
        btrfs_check(image)
        # Now it is in use.
        assert self.stretch(reshape, image, START + GIB, RESHAPED_BYTES - GIB)[0] == 2

    def test_what_cannot_be_is_refused(
        self, originals: None, sparse_path: Path, reshape: Reshape
    ) -> None:
        image = make_btrfs(sparse_path / "image")
        before = dict(fmt.data_bytes(image))
        for offset, length in (
            (START, RESHAPED_BYTES + 65536),
            (START + BLOCK, RESHAPED_BYTES - GIB),
            (START, 0),
            (0, GIB),
            (2**64 - 65536, 65536),
        ):
            status, reason = self.stretch(reshape, image, offset, length)
            assert status == 2, (offset, length)
            assert "data chunk" in reason or "cannot be" in reason
        assert dict(fmt.data_bytes(image)) == before

    def test_what_is_not_new_is_refused(
        self, originals: tuple[Path, Path], sparse_path: Path, reshape: Reshape
    ) -> None:
        used = copy_sparse(originals[0], sparse_path / "used")
        mixed = make_btrfs(sparse_path / "mixed", "--mixed", size_bytes=4 * GIB)
        no_tree = make_btrfs(
            sparse_path / "no-tree", "-R", "^free-space-tree", size_bytes=8 * GIB
        )
        for image in (used, mixed, no_tree):
            before = dict(fmt.data_bytes(image))
            assert self.stretch(reshape, image, GIB, GIB)[0] == 2
            assert dict(fmt.data_bytes(image)) == before
