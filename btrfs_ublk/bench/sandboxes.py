"""Forks as sandboxes: how long the nth takes and what it costs, beside overlayfs and
plain snapshots of btrfs.

``python -m btrfs_ublk.bench.sandboxes --help``
"""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import click

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, Program
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench import options
from btrfs_ublk.bench.disk import DISK_BYTES, new_disk
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, study, table
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.kernel.btrfs import create_snapshot, create_subvolume, delete_subvolume
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mount_now, mounted, unmount_now
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import KIB
from btrfs_ublk.volume import (
    ForkMode,
    VolumeDefinition,
    down_volume,
    fork_image,
    forks_of_image,
    remove_volume,
    unfork_image,
    up_volume,
)

EROFS = Program("mkfs.erofs", package="erofs-utils")
_NAME, _TIMEOUT_S = "sandboxes", 600.0
_IN_A_DIRECTORY, _FILE_BYTES = 100, 4 * KIB
#: The nth is the median of so many.
_WINDOW = 10


@dataclass(frozen=True)
class Sandboxes:
    """How one is made and removed; a path on the file system that has what is written;
    how all are listed, if there is a way."""

    fork: Callable[[str], object]
    drop: Callable[[str], object]
    disk: Path
    list: Callable[[], object] | None = None


Open = Callable[[Path, Path], AbstractContextManager[Sandboxes]]


@contextmanager
def _ours(mode: ForkMode, tree: Path, work: Path) -> Iterator[Sandboxes]:
    layout, base, mount = work / "layout", work / "volumes", work / "mnt"
    build_image(tree, layout, BuildOptions(), tag="it")
    made = VolumeDefinition(
        image=f"oci:{layout}:it", mount=mount, writable_bytes=DISK_BYTES
    )
    try:
        up_volume(_NAME, made, base=base)
        yield Sandboxes(
            lambda name: fork_image(_NAME, name, mode=mode, base=base),
            lambda name: unfork_image(_NAME, name, base=base),
            mount,
            lambda: forks_of_image(_NAME, base=base),
        )
    finally:
        if (base / _NAME).exists():
            down_volume(_NAME, base=base)
            remove_volume(_NAME, base=base)


@contextmanager
def _snapshots(tree: Path, work: Path) -> Iterator[Sandboxes]:
    with new_disk("btrfs", work) as disk:
        layer = create_subvolume(disk, "layer")
        shutil.copytree(tree, layer, dirs_exist_ok=True)
        run_program(["sync", "--file-system", disk], timeout_s=_TIMEOUT_S)
        yield Sandboxes(
            lambda name: create_snapshot(layer, disk, name),
            lambda name: delete_subvolume(disk / name),
            disk,
        )


@contextmanager
def _overlays(on_erofs: bool, tree: Path, work: Path) -> Iterator[Sandboxes]:
    """What is written is on an ext4, and nothing of it is synced."""
    with ExitStack() as stack:
        disk, lower = stack.enter_context(new_disk("ext4", work)), work / "lower"
        if on_erofs:
            image = work / "tree.erofs"
            run_program(["mkfs.erofs", "--quiet", image, tree], timeout_s=_TIMEOUT_S)
            lower.mkdir()
            device = stack.enter_context(loop_device(image, read_only=True))
            place = mounted(device.path, lower, fs_type="erofs", read_only=True)
            stack.enter_context(place)
        else:
            lower = disk / "tree"
            shutil.copytree(tree, lower)

        def fork(name: str) -> None:
            own = disk / name
            for each in ("upper", "work", "shown"):
                (own / each).mkdir(parents=True)
            of = [f"lowerdir={lower}", f"upperdir={own}/upper", f"workdir={own}/work"]
            mount_now("overlay", own / "shown", "overlay", options=of)

        def drop(name: str) -> None:
            unmount_now(disk / name / "shown")
            shutil.rmtree(disk / name)

        yield Sandboxes(fork, drop, disk)


SUBJECTS: dict[str, Open] = {
    "fork, overlay": partial(_ours, "overlay"),
    "fork, snapshot": partial(_ours, "snapshot"),
    "btrfs snapshot": _snapshots,
    "overlayfs + EROFS": partial(_overlays, True),
    "overlayfs + ext4": partial(_overlays, False),
}


def _make_tree(tree: Path, files: int) -> None:
    chances = random.Random(1)
    for number in range(files):
        path = tree / str(number // _IN_A_DIRECTORY) / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chances.randbytes(_FILE_BYTES))


def _took_ms(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1e3


def _slab_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Slab:"):
            return int(line.split()[1]) * KIB
    return 0


def _used_bytes(disk: Path) -> int:
    run_program(["sync", "--file-system", disk], timeout_s=_TIMEOUT_S)
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _measure(place: Sandboxes, forks: int) -> Result:
    names = [f"fork-{number}" for number in range(1, forks + 1)]
    slab_bytes, used_bytes = _slab_bytes(), _used_bytes(place.disk)
    made_ms = [_took_ms(partial(place.fork, name)) for name in names]
    result: Result = {
        "slab_bytes": (_slab_bytes() - slab_bytes) / forks,
        "disk_bytes": (_used_bytes(place.disk) - used_bytes) / forks,
    }
    if place.list is not None:
        result["list_ms"] = _took_ms(place.list)
    dropped_ms = [_took_ms(partial(place.drop, name)) for name in reversed(names)]
    dropped_ms.reverse()
    for key, found in (("fork", made_ms), ("drop", dropped_ms)):
        result[f"first_{key}_ms"] = found[0]
        result[f"early_{key}_ms"] = median(found[:_WINDOW])
        result[f"last_{key}_ms"] = median(found[-_WINDOW:])
        result[f"max_{key}_ms"] = max(found)
    return result


def tables(document: Document) -> list[Table]:
    given = document["parameters"]
    order, results = list(SUBJECTS), document["results"]
    results.sort(key=lambda each: order.index(each["subject"]))
    columns = [
        TURNS,
        Column("first fork, ms", "first_fork_ms", 1),
        Column("1st to 10th", "early_fork_ms", 2),
        Column(f"{given['forks']}th", "last_fork_ms", 2),
        Column("longest", "max_fork_ms", 1),
        Column("drop of the 10th", "early_drop_ms", 2),
        Column(f"of the {given['forks']}th", "last_drop_ms", 2),
        Column("list", "list_ms", 1),
        Column("disk, KiB", "disk_bytes", 1, 1 / KIB),
        Column("slab, KiB", "slab_bytes", 1, 1 / KIB),
        LOAD,
    ]
    note = (
        f"Of a tree of {given['files']} files of 4 KiB; the medians of ten forks, and "
        "what a fork costs that nothing was written to. Forks and snapshots are on the "
        "disk when they are made; overlays are not. Forks are of a lazy image."
    )
    names = {"": lambda x: str(x["subject"])}
    return [table("Sandboxes: the nth fork, in ms", results, names, columns, note=note)]


@study(
    "sandboxes",
    click.option("--forks", type=options.COUNT, default=1000),
    click.option("--files", type=options.COUNT, default=10_000),
    click.option(
        *("--subject", "chosen"),
        type=click.Choice(list(SUBJECTS)),
        multiple=True,
        default=list(SUBJECTS),
    ),
    needs=(ROOT, BTRFS, LOOP, FUSE, EROFS),
    repeats=3,
    in_memory=True,
    recorded=("forks", "files"),
)
def command(run: Run, forks: int, files: int, chosen: Sequence[str]) -> None:
    """Make forks of one image until there are many, list them, and drop all."""
    with tempdir(parent=run.parent) as root:
        _make_tree(root / "tree", files)
        for subject in run.drawn(chosen):
            with tempdir(parent=root) as work:
                with SUBJECTS[subject](root / "tree", work) as place:
                    run.add({"subject": subject} | _measure(place, forks))


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.sandboxes")
