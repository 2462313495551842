"""``ls -lR`` of one tree on many file systems: right after mounting, again, and the
most memory that it uses.
"""

from __future__ import annotations

import os
import random
import stat
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
    FileSystem,
    Program,
)
from btrfs_ublk.base.process import run
from btrfs_ublk.bench.file_systems import (
    EROFS,
    EXT4,
    MKFS_EROFS,
    MKFS_EXT4,
    OVERLAY,
    make_erofs,
    on_loop,
    overlay,
)
from btrfs_ublk.bench.peer import Contestant, Measure, OwnContest, Setting, Turn
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.resources.cgroup import MEMORY_GROUPS, memory_group
from btrfs_ublk.bench.suite import Amounts
from btrfs_ublk.errors import BtrfsUblkError, CommandError
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.seed import make_seed
from btrfs_ublk.server import BlockServer, FrontEndName, PatternSegment
from btrfs_ublk.units import GIB, KIB, MIB
from btrfs_ublk.volume.sprout import sprout
from btrfs_ublk.volume.temporary import virtual_file_of

WORKLOAD = "ls -lR"
_TIMEOUT_S = 600.0
_SEED = 20_261_120
_MAX_FILE_BYTES = 8 * KIB
#: With random letters, names do not sort in the order of making, as in real trees.
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_TYPES = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}
_TREE = "tree"
#: The size of sparse images for file systems that are filled by writing.
_IMAGE_BYTES = 16 * GIB
#: Joins the group (its first argument) before it runs what is measured.
_LIST = 'echo 0 >"$1" && exec env LC_ALL=C ls -lR "$2" >"$3"'

#: Fills a file: path, size in bytes, and the offset of its data in all content.
Fill = Callable[[Path, int, int], None]


@dataclass(frozen=True)
class TreePlan:
    """Numbers of directories, regular files and symbolic links. Equal numbers always
    give the same tree.
    """

    files: int
    directories: int
    links: int

    def _names(self) -> Iterator[tuple[str, str, int]]:
        """Yield the kind, path and size of each, parents first."""
        chances = random.Random(_SEED)
        directories = [""]
        for number in range(self.directories):
            # Real trees are deep in some places and wide in others.
            parent = directories[int(len(directories) * chances.random() ** 2)]
            path = f"{parent}{_name(chances, number)}"
            directories.append(f"{path}/")
            yield "directory", path, 0
        for number in range(self.files):
            path = f"{chances.choice(directories)}{_name(chances, number)}.so"
            yield "file", path, chances.randint(1, _MAX_FILE_BYTES)
        for number in range(self.links):
            path = f"{chances.choice(directories)}{_name(chances, number)}.link"
            yield "link", path, chances.randint(1, 60)

    @property
    def content_bytes(self) -> int:
        """The size of all files' content, with whole blocks for each file."""
        return self.files * _MAX_FILE_BYTES

    def make(self, root: Path, fill: Fill) -> None:
        """Make the tree in an empty directory."""
        offset = 0
        for kind, name, size in self._names():
            path = root / name
            if kind == "directory":
                path.mkdir()
            elif kind == "link":
                path.symlink_to("x" * size)
            else:
                fill(path, size, offset)
                offset += _MAX_FILE_BYTES

    def check(self, root: Path) -> None:
        """Raise BtrfsUblkError unless names, kinds and sizes are those of the plan."""
        wanted = {
            name: (kind, 0 if kind == "directory" else size)
            for kind, name, size in self._names()
        }
        found = {}
        for parent, directories, files in os.walk(root):
            for name in (*directories, *files):
                path = Path(parent, name)
                status = path.lstat()
                kind = _TYPES.get(stat.S_IFMT(status.st_mode), "something else")
                size = 0 if kind == "directory" else status.st_size
                found[str(path.relative_to(root))] = (kind, size)
        if found == wanted:
            return
        some = next(
            name
            for name in sorted({*wanted, *found})
            if wanted.get(name) != found.get(name)
        )
        raise BtrfsUblkError(
            f"{root / some} is {found.get(some)}, not {wanted.get(some)}"
        )


def _name(chances: random.Random, number: int) -> str:
    return "".join(chances.choices(_LETTERS, k=8)) + str(number)


def write(path: Path, size: int, offset: int) -> None:
    """Fill a file with bytes that depend on its offset."""
    path.write_bytes((offset.to_bytes(8, "little") * (size // 8 + 1))[:size])


#: Mounts the image anew on a directory; yields where the tree is.
Mounted = Callable[[Path], AbstractContextManager[Path]]
#: Makes the tree's image once; its resources are put on the stack.
Prepare = Callable[[Setting, TreePlan, ExitStack], Mounted]


@contextmanager
def _taking_part(plan: TreePlan, prepare: Prepare, setting: Setting) -> Iterator[Turn]:
    """Mount the image anew in each turn, so that only its backing file is in memory.
    The time to mount does not count.
    """
    with ExitStack() as stack:
        mount = prepare(setting, plan, stack)
        target = setting.new_directory("mnt")
        with mount(target) as tree:
            plan.check(tree)
        yield partial(_measure, plan, mount, target, setting.new_directory("out"))


def _measure(
    plan: TreePlan,
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
    wanted = plan.files + plan.directories + plan.links
    # Both listings must be equal, with a line for each member of the tree.
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
    """Return the tree itself, on tmpfs, to make images of it."""

    @contextmanager
    def new() -> Iterator[Path]:
        source = setting.new_directory("source")
        plan.make(source, write)
        yield source

    return setting.shared("tree", new)


def _image(setting: Setting, plan: TreePlan) -> Path:
    """Return an EROFS image of the tree, shared by all."""

    @contextmanager
    def new() -> Iterator[Path]:
        image = setting.new_directory("image") / "erofs.img"
        make_erofs(_source(setting, plan), image)
        yield image

    return setting.shared("erofs image", new)


def _erofs(setting: Setting, plan: TreePlan, _stack: ExitStack) -> Mounted:
    return partial(on_loop, _image(setting, plan), fs_type="erofs", read_only=True)


def _overlay(setting: Setting, plan: TreePlan, stack: ExitStack) -> Mounted:
    """Written data are on tmpfs."""
    lower, erofs = setting.new_directory("lower"), _erofs(setting, plan, stack)

    @contextmanager
    def mount(target: Path) -> Iterator[Path]:
        with erofs(lower), overlay(lower, setting.new_directory("upper"), target):
            yield target

    return mount


def _written(
    fs_type: str,
    mkfs: Sequence[str],
    setting: Setting,
    plan: TreePlan,
    stack: ExitStack,
) -> Mounted:
    """Prepare a file system on a loop device, and make the tree in it."""
    image = stack.enter_context(setting.new_file(_IMAGE_BYTES))
    target = setting.new_directory("mnt")
    with loop_device(image) as device:
        run([*mkfs, device.path], timeout_s=_TIMEOUT_S)
        with mounted(device.path, target, fs_type=fs_type):
            (target / _TREE).mkdir()
            plan.make(target / _TREE, write)
    return partial(on_loop, image, fs_type=fs_type, inside=_TREE)


def _clones(
    front_end: FrontEndName, setting: Setting, plan: TreePlan, stack: ExitStack
) -> Mounted:
    """Prepare a sprout whose files are clones of virtual data from a server."""
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
    with (
        sprout(server.device, target, writable_file=writable),
        virtual_file_of(seed, target) as virtual_file,
    ):

        def clone(path: Path, size: int, offset: int) -> None:
            clone_file(virtual_file, path, source_offset=offset, size_bytes=size)

        (target / _TREE).mkdir()
        plan.make(target / _TREE, clone)
    return partial(on_loop, writable, options=[f"device={server.device}"], inside=_TREE)


_ON_EROFS = (EROFS, MKFS_EROFS)
#: The description, further needs, and preparation of each kind.
_KINDS: dict[str, tuple[str, Sequence[Capability], Prepare]] = {
    "xfs": (
        "xfs on a loop device",
        (FileSystem("xfs"), Program("mkfs.xfs", "xfsprogs")),
        partial(_written, "xfs", ["mkfs.xfs", "-q"]),
    ),
    "ext4": (
        "ext4 on a loop device",
        (EXT4, MKFS_EXT4),
        # Otherwise, inode tables would be written later, in the background.
        partial(_written, "ext4", ["mkfs.ext4", "-q", "-E", "lazy_itable_init=0"]),
    ),
    "btrfs": (
        "btrfs on a loop device",
        (BTRFS, MKFS_BTRFS),
        partial(_written, "btrfs", ["mkfs.btrfs", "--quiet", "--metadata=single"]),
    ),
    "erofs-loop": ("EROFS on a loop device", _ON_EROFS, _erofs),
    "overlay-erofs": (
        "overlayfs on EROFS on a loop device",
        (*_ON_EROFS, OVERLAY),
        _overlay,
    ),
    "fuse-clones": (
        "a sprout of ours, of clones, through FUSE",
        (BTRFS, FUSE),
        partial(_clones, "fuse"),
    ),
    "ublk-clones": (
        "a sprout of ours, of clones, through ublk",
        (BTRFS, UBLK),
        partial(_clones, "ublk"),
    ),
}
_MEASURES = (
    Measure("cold_ms", "ms"),
    Measure("warm_ms", "ms"),
    Measure("peak_mib", "MiB", digits=1),
)


def contest(amounts: Amounts) -> OwnContest:
    """Make a contest with those numbers of files, directories and links."""
    plan = TreePlan(**{name: int(count) for name, count in amounts.items()})
    common = (ROOT, LOOP, MEMORY_GROUPS)
    contestants = [
        Contestant(
            name,
            "tree",
            description,
            (*common, *needs),
            partial(_taking_part, plan, prepare),
        )
        for name, (description, needs, prepare) in _KINDS.items()
    ]
    told = "list all, with what stat(2) says of each"
    return OwnContest(_MEASURES, contestants, {WORKLOAD: told})
