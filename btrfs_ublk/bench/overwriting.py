"""Writing 4 KiB into a large file whose data are not local yet: a clone of virtual data
only stores the block, overlayfs first copies up the whole file.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from btrfs_ublk.base.capabilities import (
    BTRFS,
    FUSE,
    LOOP,
    MKFS_BTRFS,
    ROOT,
    UBLK,
    Capability,
)
from btrfs_ublk.bench.content import STAMPS, write_content
from btrfs_ublk.bench.file_systems import (
    EROFS,
    MKFS_EROFS,
    OVERLAY,
    formatted_btrfs,
    make_erofs,
    on_loop,
    overlay,
    sync_file_system,
)
from btrfs_ublk.bench.peer import Contestant, Measure, OwnContest, Setting, Turn
from btrfs_ublk.bench.report import Result
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.server import FrontEndName, PatternSegment
from btrfs_ublk.units import BLOCK_BYTES, GIB, KIB
from btrfs_ublk.volume.temporary import volume

WORKLOAD = "4 KiB, fsync"
_WRITTEN = b"\x33" * BLOCK_BYTES
#: The sector size in /sys/block/NAME/stat, whatever the device's is.
_SECTOR_BYTES = 512
#: The word of that file that counts written sectors (Documentation/block/stat.rst).
_SECTORS_WRITTEN = 6


@dataclass(frozen=True)
class Fresh:
    """A file before any write, and a function for the bytes that were written since."""

    path: Path
    content: Callable[[int, int], bytes]
    written_bytes: Callable[[], int]


#: Makes a new file.
Freshly = Callable[[], AbstractContextManager[Fresh]]
Prepare = Callable[[Setting, ExitStack], Freshly]


@contextmanager
def _taking_part(prepare: Prepare, setting: Setting) -> Iterator[Turn]:
    """Measure with a new file in each turn."""
    with ExitStack() as stack:
        fresh = prepare(setting, stack)

        def turn(_workload: str, chances: random.Random) -> Result:
            with fresh() as file:
                return _measure(file, setting.size_bytes, chances)

        yield turn


def _measure(file: Fresh, size_bytes: int, chances: random.Random) -> Result:
    offset = chances.randrange(1, size_bytes // BLOCK_BYTES) * BLOCK_BYTES
    before = file.written_bytes()
    begin_s = time.monotonic()
    fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(fd, _WRITTEN, offset)
        os.fsync(fd)
        elapsed_s = time.monotonic() - begin_s
        written = file.written_bytes() - before
        start = offset - BLOCK_BYTES
        found = os.pread(fd, 2 * BLOCK_BYTES, start)
    finally:
        os.close(fd)
    if found != file.content(start, BLOCK_BYTES) + _WRITTEN:
        raise BtrfsUblkError(f"{file.path} does not hold what was written at {offset}")
    return {"ms": elapsed_s * 1e3, "written_kib": written / KIB}


def _device_written(device: Path) -> Callable[[], int]:
    stat = Path("/sys/block", device.name, "stat")
    return lambda: int(stat.read_text().split()[_SECTORS_WRITTEN]) * _SECTOR_BYTES


def _clone(front_end: FrontEndName, setting: Setting, stack: ExitStack) -> Freshly:
    size_bytes = setting.size_bytes
    served = PatternSegment(offset=0, length=size_bytes)
    made = stack.enter_context(
        volume(
            setting.new_directory(front_end),
            [served],
            virtual_data_size=max(size_bytes, GIB),
            parent=setting.directory,
            front_end=front_end,
        )
    )
    written = _device_written(made.sprout.writable.path)

    @contextmanager
    def fresh() -> Iterator[Fresh]:
        path = made.clone("clone", offset=0, size_bytes=size_bytes)
        sync_file_system(made.target)
        yield Fresh(path, served.content, written)
        path.unlink()

    return fresh


def _reflink(setting: Setting, stack: ExitStack) -> Freshly:
    """Prepare cp --reflink of a local file, on btrfs."""
    target, device = _filled_btrfs(setting, stack)

    @contextmanager
    def fresh() -> Iterator[Fresh]:
        path = target / "copy"
        clone_file(
            target / "file", path, source_offset=0, size_bytes=setting.size_bytes
        )
        sync_file_system(target)
        yield Fresh(path, STAMPS.content, _device_written(device))
        path.unlink()

    return fresh


def _filled_btrfs(setting: Setting, stack: ExitStack) -> tuple[Path, Path]:
    """Make a btrfs with a file; return its mount point and device."""
    image = stack.enter_context(setting.new_file(2 * setting.size_bytes + GIB))
    device = stack.enter_context(loop_device(image)).path
    target = setting.new_directory("mnt")
    stack.enter_context(formatted_btrfs(device, target))
    write_content(target / "file", STAMPS, setting.size_bytes)
    return target, device


def _overlay_on_btrfs(setting: Setting, stack: ExitStack) -> Freshly:
    """Prepare both layers on one btrfs, where overlayfs copies up by reflink."""
    base, device = _filled_btrfs(setting, stack)
    lower = base / "lower"
    lower.mkdir()
    (base / "file").rename(lower / "file")

    @contextmanager
    def fresh() -> Iterator[Fresh]:
        target = setting.new_directory("mnt")
        upper = base / target.name
        upper.mkdir()
        with overlay(lower, upper, target):
            sync_file_system(base)
            yield Fresh(target / "file", STAMPS.content, _device_written(device))

    return fresh


def _overlay_on_erofs(setting: Setting, stack: ExitStack) -> Freshly:
    tree, lower = setting.new_directory("tree"), setting.new_directory("lower")
    os.link(setting.source_file(), tree / "file")
    image = setting.new_directory("image") / "erofs.img"
    make_erofs(tree, image)
    stack.enter_context(on_loop(image, lower, fs_type="erofs", read_only=True))

    @contextmanager
    def fresh() -> Iterator[Fresh]:
        target, upper = map(setting.new_directory, ("mnt", "upper"))
        copy = upper / "files" / "file"

        def written() -> int:
            return copy.stat().st_blocks * _SECTOR_BYTES if copy.exists() else 0

        with overlay(lower, upper, target):
            yield Fresh(target / "file", STAMPS.content, written)
        copy.unlink()  # frees its memory for the next one

    return fresh


_KINDS: dict[str, tuple[str, Sequence[Capability], Prepare]] = {
    "fuse-clone": (
        "a clone on a sprout of ours, through FUSE",
        [FUSE],
        partial(_clone, "fuse"),
    ),
    "ublk-clone": (
        "a clone on a sprout of ours, through ublk",
        [UBLK],
        partial(_clone, "ublk"),
    ),
    "btrfs-reflink": (
        "a reflink of a file that is here, on btrfs",
        [MKFS_BTRFS],
        _reflink,
    ),
    "overlay-btrfs": (
        "overlayfs, both layers on one btrfs: copied up by reflink",
        [MKFS_BTRFS, OVERLAY],
        _overlay_on_btrfs,
    ),
    "overlay-erofs": (
        "overlayfs on EROFS, the upper layer on tmpfs: copied up whole",
        [EROFS, MKFS_EROFS, OVERLAY],
        _overlay_on_erofs,
    ),
}


CONTEST = OwnContest(
    (Measure("ms", "ms", digits=2), Measure("written_kib", "KiB")),
    [
        Contestant(
            name,
            "file",
            description,
            (ROOT, LOOP, *(() if EROFS in needs else (BTRFS,)), *needs),
            partial(_taking_part, prepare),
        )
        for name, (description, needs, prepare) in _KINDS.items()
    ],
    {WORKLOAD: "one block, anywhere in the file, then fsync"},
)
