"""``ls -lR`` of one tree on many file systems: right after mounting, again, and the
most memory that it needs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from btrfs_ublk.bench.contest import Contestant, Measure, OwnContest, Turn
from btrfs_ublk.bench.contests.trees import TreePlan, write
from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.bench.read_only import (
    EROFS,
    EXT4,
    MKCOMPOSEFS,
    MKFS_EROFS,
    MKFS_EXT4,
    MOUNT_COMPOSEFS,
    OVERLAY,
    MountErofs,
    composefs,
    erofs_on_file,
    erofs_on_loop,
    host_erofs,
    make_composefs,
    make_erofs,
    overlay,
)
from btrfs_ublk.bench.report import Result
from btrfs_ublk.capabilities import (
    BTRFS,
    FUSE,
    LOOP,
    MKFS_BTRFS,
    ROOT,
    UBLK,
    Capability,
    FileSystem,
    Program,
)
from btrfs_ublk.errors import CommandError
from btrfs_ublk.process import run
from btrfs_ublk.resources.cgroup import MEMORY_GROUPS, memory_group
from btrfs_ublk.resources.loop import loop_device
from btrfs_ublk.resources.mount import mounted
from btrfs_ublk.resources.reflink import clone_file
from btrfs_ublk.seed import make_seed
from btrfs_ublk.server import BlockServer, FrontEndName, PatternSegment
from btrfs_ublk.sprout import sprout
from btrfs_ublk.units import GIB, MIB

WORKLOAD = "ls -lR"
_TIMEOUT_S = 600.0
_TREE = "tree"
#: Of images for file systems that are made by writing; sparse.
_IMAGE_BYTES = 16 * GIB
#: Becomes a member of the group (its first argument) before it is what is measured.
_LIST = 'echo 0 >"$1" && exec env LC_ALL=C ls -lR "$2" >"$3"'

#: Makes the tree's image once, and mounts it in each turn, new.
Mounted = Callable[[Path], AbstractContextManager[Path]]
Prepare = Callable[[Setting, TreePlan, ExitStack], Mounted]


@dataclass(frozen=True)
class Listed:
    """``prepare`` makes what is mounted anew in each turn, so that nothing of it is in
    memory but the file that it is on. Mounting does not count.
    """

    name: str
    description: str
    needs: Sequence[Capability]
    plan: TreePlan
    prepare: Prepare

    layer: ClassVar[str] = "tree"

    @contextmanager
    def taking_part(self, setting: Setting) -> Iterator[Turn]:
        with ExitStack() as stack:
            mount = self.prepare(setting, self.plan, stack)
            target = setting.new_directory("mnt")
            with mount(target) as tree:
                self.plan.check(tree)
            yield partial(self._measure, mount, target, setting.new_directory("out"))

    def _measure(
        self,
        mount: Mounted,
        target: Path,
        output: Path,
        _workload: str,
        _chances: random.Random,
    ) -> Result:
        with mount(target) as tree, memory_group() as group:
            outputs = output / "cold", output / "warm"
            seconds = [_list(group.members, tree, path) for path in outputs]
            peak = group.peak_bytes()
        texts = [path.read_bytes() for path in outputs]
        wanted = self.plan.files + self.plan.directories + self.plan.links
        # What they say of one tree is the same; a line for each of its members.
        listed = sum(line[:1] in b"-dl" for line in texts[0].splitlines() if line)
        if texts[0] != texts[1] or listed != wanted:
            raise CommandError(f"ls -lR listed {listed} of {wanted}, or changed")
        return {
            "cold_ms": seconds[0] * 1e3,
            "warm_ms": seconds[1] * 1e3,
            "peak_mib": peak / MIB,
        }


def _list(members: Path, tree: Path, output: Path) -> float:
    begin_s = time.monotonic()
    run(["sh", "-c", _LIST, "sh", members, tree, output], timeout_s=_TIMEOUT_S)
    return time.monotonic() - begin_s


def _source(setting: Setting, plan: TreePlan) -> Path:
    """The tree itself, on tmpfs, for those who make images of it."""
    return setting.shared("tree", lambda: _new_source(setting, plan))


@contextmanager
def _new_source(setting: Setting, plan: TreePlan) -> Iterator[Path]:
    source = setting.new_directory("source")
    plan.make(source, write)
    yield source


def _image(setting: Setting, plan: TreePlan) -> Path:
    return setting.shared("erofs tree", lambda: _new_image(setting, plan))


@contextmanager
def _new_image(setting: Setting, plan: TreePlan) -> Iterator[Path]:
    image = setting.new_directory("image") / "erofs.img"
    make_erofs(_source(setting, plan), image)
    yield image


def _erofs(mount: MountErofs) -> Prepare:
    def prepare(setting: Setting, plan: TreePlan, _: ExitStack) -> Mounted:
        image = _image(setting, plan)

        @contextmanager
        def mount_it(target: Path) -> Iterator[Path]:
            with mount(image, target):
                yield target

        return mount_it

    return prepare


def _erofs_on_file(setting: Setting, plan: TreePlan, stack: ExitStack) -> Mounted:
    disk = stack.enter_context(setting.new_file(_IMAGE_BYTES))
    host = setting.new_directory("host")
    host_erofs(_image(setting, plan), disk, host)

    @contextmanager
    def mount_it(target: Path) -> Iterator[Path]:
        with erofs_on_file(disk, host, target):
            yield target

    return mount_it


def _overlay(direct_io: bool) -> Prepare:
    def prepare(setting: Setting, plan: TreePlan, _: ExitStack) -> Mounted:
        image, lower = _image(setting, plan), setting.new_directory("lower")

        @contextmanager
        def mount_it(target: Path) -> Iterator[Path]:
            upper = setting.new_directory("upper")
            with erofs_on_loop(image, lower, direct_io=direct_io):
                with overlay(lower, upper, target):
                    yield target

        return mount_it

    return prepare


def _composefs(setting: Setting, plan: TreePlan, _: ExitStack) -> Mounted:
    store, images = setting.new_directory("store"), setting.new_directory("image")
    image = images / "composefs.img"
    make_composefs(_source(setting, plan), image, store)

    @contextmanager
    def mount_it(target: Path) -> Iterator[Path]:
        with composefs(image, store, target):
            yield target

    return mount_it


def _written(fs_type: str, mkfs: Sequence[str]) -> Prepare:
    """A file system on a loop device, in which the tree is made."""

    def prepare(setting: Setting, plan: TreePlan, stack: ExitStack) -> Mounted:
        image = stack.enter_context(setting.new_file(_IMAGE_BYTES))
        target = setting.new_directory("mnt")
        with loop_device(image) as device:
            run([*mkfs, device.path], timeout_s=_TIMEOUT_S)
            with mounted(device.path, target, fs_type=fs_type):
                (target / _TREE).mkdir()
                plan.make(target / _TREE, write)

        @contextmanager
        def mount_it(target: Path) -> Iterator[Path]:
            with loop_device(image) as device:
                with mounted(device.path, target, fs_type=fs_type):
                    yield target / _TREE

        return mount_it

    return prepare


def _clones(front_end: FrontEndName) -> Prepare:
    """A sprout whose files are clones of virtual data, which a server answers."""

    def prepare(setting: Setting, plan: TreePlan, stack: ExitStack) -> Mounted:
        directory = setting.new_directory(front_end)
        size_bytes = max(GIB, -(-plan.content_bytes // GIB) * GIB)
        seed = make_seed(
            directory / "seed.img", virtual_data_size=size_bytes, metadata_only=True
        )
        served = [PatternSegment(offset=0, length=size_bytes)]
        server = stack.enter_context(
            BlockServer(seed.description(served), front_end=front_end)
        )
        writable = stack.enter_context(setting.new_file(_IMAGE_BYTES))
        target = setting.new_directory("mnt")
        with sprout(server.device, target, writable_file=writable):
            virtual_file = target / seed.virtual_data.filename
            (target / _TREE).mkdir()
            plan.make(target / _TREE, _cloned(virtual_file))

        @contextmanager
        def mount_it(target: Path) -> Iterator[Path]:
            with loop_device(writable) as device:
                options = [f"device={server.device}"]
                with mounted(device.path, target, options=options):
                    yield target / _TREE

        return mount_it

    return prepare


def _cloned(virtual_file: Path) -> Callable[[Path, int, int], None]:
    def fill(path: Path, size: int, offset: int) -> None:
        clone_file(virtual_file, path, source_offset=offset, size_bytes=size)

    return fill


def _contestants(plan: TreePlan) -> list[Contestant]:
    common = (ROOT, LOOP, MEMORY_GROUPS)
    erofs = (*common, EROFS, MKFS_EROFS)
    clones = (*common, BTRFS)
    ready: list[tuple[str, str, Sequence[Capability], Prepare]] = [
        (
            "xfs",
            "xfs on a loop device",
            (*common, FileSystem("xfs"), Program("mkfs.xfs", "xfsprogs")),
            _written("xfs", ["mkfs.xfs", "-q"]),
        ),
        (
            "ext4",
            "ext4 on a loop device",
            (*common, EXT4, MKFS_EXT4),
            # Else inode tables are written in the background, later.
            _written("ext4", ["mkfs.ext4", "-q", "-E", "lazy_itable_init=0"]),
        ),
        (
            "btrfs",
            "btrfs on a loop device",
            (*common, BTRFS, MKFS_BTRFS),
            _written("btrfs", ["mkfs.btrfs", "--quiet", "--metadata=single"]),
        ),
        (
            "erofs-loop",
            "EROFS on a loop device",
            erofs,
            _erofs(partial(erofs_on_loop, direct_io=False)),
        ),
        (
            "erofs-loop-direct",
            "EROFS on a loop device with direct I/O",
            erofs,
            _erofs(partial(erofs_on_loop, direct_io=True)),
        ),
        (
            "erofs-file",
            "EROFS on a file of ext4, no device",
            (*erofs, EXT4, MKFS_EXT4),
            _erofs_on_file,
        ),
        (
            "overlay-erofs",
            "overlayfs on EROFS on a loop device",
            (*erofs, OVERLAY),
            _overlay(False),
        ),
        (
            "overlay-erofs-direct",
            "overlayfs on EROFS on a loop device with direct I/O",
            (*erofs, OVERLAY),
            _overlay(True),
        ),
        (
            "composefs",
            "composefs, its contents on tmpfs",
            (*common, EROFS, OVERLAY, MKCOMPOSEFS, MOUNT_COMPOSEFS),
            _composefs,
        ),
        (
            "fuse-clones",
            "a sprout of ours, of clones, through FUSE",
            (*clones, FUSE),
            _clones("fuse"),
        ),
        (
            "ublk-clones",
            "a sprout of ours, of clones, through ublk",
            (*clones, UBLK),
            _clones("ublk"),
        ),
    ]
    return [
        Listed(name, description, needs, plan, prepare)
        for name, description, needs, prepare in ready
    ]


def listing(plan: TreePlan) -> OwnContest:
    """Of that tree."""
    return OwnContest(
        (
            Measure("cold_ms", "ms"),
            Measure("warm_ms", "ms"),
            Measure("peak_mib", "MiB", digits=1),
        ),
        _contestants(plan),
        {WORKLOAD: "list all, with what stat(2) says of each"},
    )
