"""Many forks of one sealed image, as snapshots and as overlays: what making them takes,
with a write to each, and what readers of one file in several of them take.

``python -m btrfs_ublk.bench.forks --help``
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from btrfs_ublk import volume as volumes
from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.bench import options
from btrfs_ublk.bench.file_systems import metadata_used_bytes
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import Column, Run, study, table
from btrfs_ublk.image import BuildOptions, build_image
from btrfs_ublk.kernel.btrfs import commit_transaction
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import GIB, KIB, MIB

_NAME = "forks-study"
_SECTOR_BYTES = 512
#: In /proc/meminfo. Inodes and names that could be dropped are among them.
_KERNEL = ("Slab", "KernelStack", "PageTables", "Percpu")


def _memory_bytes(*names: str) -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * KIB for line in lines}
    return sum(fields[name] for name in names)


@contextmanager
def _volume(root: Path, image: str) -> Iterator[volumes.KeptVolume]:
    definition = volumes.VolumeDefinition(
        image=image, mount=root / "mnt", writable_bytes=16 * GIB
    )
    base = root / "volumes"
    up = volumes.up_volume(_NAME, definition, base=base)
    try:
        yield up
    finally:
        volumes.down_volume(_NAME, base=base)
        volumes.remove_volume(_NAME, base=base)


def _measure(
    root: Path, image: str, mode: volumes.ForkMode, forks: int, readers: int
) -> Result:
    with _volume(root, image) as up:
        assert up.mount is not None and up.device is not None
        kernel = _memory_bytes(*_KERNEL)
        metadata = metadata_used_bytes(up.mount)
        began_s = time.monotonic()
        paths = []
        for number in range(forks):
            path = volumes.fork_image(
                _NAME, str(number), mode=mode, base=root / "volumes"
            )
            (path / "written").write_bytes(os.urandom(4 * KIB))
            paths.append(path)
        made_s = time.monotonic() - began_s
        commit_transaction(up.mount)
        made = {
            "make_ms": made_s / forks * 1000,
            "kernel_bytes": (_memory_bytes(*_KERNEL) - kernel) / forks,
            "metadata_bytes": (metadata_used_bytes(up.mount) - metadata) / forks,
        }
        # The first reader fetches the file; the others are what is measured.
        first, *others = (path / "big" for path in paths[: readers + 1])
        first.read_bytes()
        statistics = Path("/sys/class/block", up.device.name, "stat")
        cached, sectors = _memory_bytes("Cached"), _sectors(statistics)
        began_s = time.monotonic()
        for each in others:
            with open(each, "rb", buffering=0) as file:
                while file.read(MIB):
                    pass
        readers_s = time.monotonic() - began_s
        read = {
            "read_s": readers_s,
            "cached_bytes": _memory_bytes("Cached") - cached,
            "device_bytes": (_sectors(statistics) - sectors) * _SECTOR_BYTES,
        }
        began_s = time.monotonic()
    return {"mode": mode, **made, **read, "down_s": time.monotonic() - began_s}


def _sectors(statistics: Path) -> int:
    return int(statistics.read_text(encoding="ascii").split()[2])


def tables(document: Document) -> list[Table]:
    """Make a table with one row for each mode."""
    given = document["parameters"]
    return [
        table(
            "Forks of one sealed image",
            document["results"],
            {"mode": lambda x: str(x["mode"])},
            [
                Column("make, ms", "make_ms", 2),
                Column("kernel, KiB", "kernel_bytes", 1, 1 / KIB),
                Column("metadata, KiB", "metadata_bytes", 1, 1 / KIB),
                Column("readers, s", "read_s", 2),
                Column("page cache, MiB", "cached_bytes", 0, 1 / MIB),
                Column("device, MiB", "device_bytes", 0, 1 / MIB),
                Column("down, s", "down_s", 2),
            ],
            note=f"{given['forks']:,} forks, with 4 KiB written to each; the first "
            "three columns are of one. Then "
            f"{given['readers']} readers of the same {given['size_bytes'] / MIB:g} "
            "MiB, which another fork has read before.",
        )
    ]


@study(
    "forks",
    click.option("--forks", type=options.COUNT, default=100),
    click.option("--readers", type=options.COUNT, default=20),
    click.option(
        "--tree",
        type=PathType(exists=True, file_okay=False),
        default="/usr/bin",
        help="What the image has beside the file to read.  [/usr/bin]",
    ),
    options.size_option("200M", "Of the file to read."),
    needs=(ROOT, BTRFS, LOOP),
    in_memory=True,
    recorded=("forks", "readers", "size_bytes"),
)
def command(run: Run, forks: int, readers: int, tree: Path, size_bytes: int) -> None:
    """Forks of an image, as snapshots and as overlays: time and memory."""
    with tempdir(parent=run.parent) as root:
        source = root / "tree"
        shutil.copytree(tree, source / "tree", symlinks=True)
        with open(source / "big", "wb") as file:
            for _ in range(size_bytes // MIB):
                file.write(os.urandom(MIB))
        built = build_image(
            source, root / "layout", BuildOptions(compression="none"), tag="forks"
        )
        shutil.rmtree(source)
        for _ in run.turns():
            for mode in volumes.FORK_MODES:
                run.add(
                    _measure(
                        root, str(built.name), mode, max(forks, readers + 1), readers
                    )
                )


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.forks")
