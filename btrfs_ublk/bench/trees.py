"""The tree of a sealed image made again in a volume of virtual data, and unpacked there
from a tar: how many entries each makes in a second.

``python -m btrfs_ublk.bench.trees --help``
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import click

from btrfs_ublk import volume as volumes
from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import TURNS, Column, Run, study, table
from btrfs_ublk.image import BuildOptions, RegistryAccess, build_image
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.kernel.btrfs import commit_transaction, create_subvolume
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import GIB

_NAME = "trees-study"
_TIMEOUT_S = 3600.0


def tables(document: Document) -> list[Table]:
    """Make a table with one row for each way."""
    return [
        table(
            "A tree in a volume of virtual data: median (best)",
            document["results"],
            {"way": lambda x: str(x["way"])},
            [
                TURNS,
                Column("entries/s", "per_s", best=True),
                Column("s", "s", 2, best=True),
                Column("CPU, s", "cpu_s", 2, best=True),
                Column("load", "load", 1),
            ],
            note=f"{document['parameters']['tree']}; until all is on disk. The CPU time"
            " is that of this process and its children, in the kernel too.",
        )
    ]


def _cpu_s() -> float:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(who) for who in whose]
    return sum(x.ru_utime + x.ru_stime for x in used)


def _measured(way: str, entries: int, mount: Path, do: Callable[[], object]) -> Result:
    load, cpu_s, began_s = os.getloadavg()[0], _cpu_s(), time.monotonic()
    do()
    commit_transaction(mount)
    took_s = time.monotonic() - began_s
    return {
        "way": way,
        "entries": entries,
        "s": took_s,
        "cpu_s": _cpu_s() - cpu_s,
        "per_s": entries / took_s,
        "load": load,
    }


@study(
    "trees",
    click.option(
        "--tree",
        type=PathType(exists=True, file_okay=False),
        default="/usr/share",
        help="What the image has.",
    ),
    needs=(ROOT, BTRFS, LOOP),
    repeats=3,
    in_memory=True,
    recorded=("tree",),
)
def command(run: Run, tree: Path) -> None:
    """Trees of an image in a volume: how fast they are made, and unpacked."""
    with tempdir(parent=run.parent) as root:
        built = build_image(
            tree, root / "layout", BuildOptions(compression="none"), tag="trees"
        )
        tar, base = root / "tree.tar", root / "volumes"
        run_program(["tar", "-C", tree, "-cf", tar, "."], timeout_s=_TIMEOUT_S)
        definition = volumes.VolumeDefinition(
            mount=root / "mnt", writable_bytes=16 * GIB
        )
        up = volumes.up_volume(_NAME, definition, base=base)
        assert up.mount is not None
        try:
            for turn in run.turns(tell=True):
                run.wait_until_quiet()
                _turn(run, up.mount, built.name, base, tar, str(turn))
        finally:
            volumes.down_volume(_NAME, base=base)
            volumes.remove_volume(_NAME, base=base)


def _turn(
    run: Run, mount: Path, image: LayoutName, base: Path, tar: Path, turn: str
) -> None:
    added: list[volumes.AddedTree] = []

    def add() -> None:
        path, access = f"added-{turn}", RegistryAccess()
        added.append(volumes.add_image(_NAME, image, path, access=access, base=base))

    result = _measured("add-image", 1, mount, add)
    entries = added[0].entries
    run.add(result | {"entries": entries, "per_s": entries / result["s"]})
    unpacked = create_subvolume(mount, f"unpacked-{turn}")
    argv: list[str | Path] = ["tar", "-C", unpacked, "-xpf", tar]
    run.add(
        _measured(
            "tar -x", entries, mount, lambda: run_program(argv, timeout_s=_TIMEOUT_S)
        )
    )


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.trees")
