"""What it takes to index an ordinary image (`image index`), beside decompressing it.

The image has one layer: a tar of a tree of this machine, compressed by gzip.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import click

from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench.report import Document, Table, number
from btrfs_ublk.bench.stats import median_of
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, study, table
from btrfs_ublk.image.build import BuildOptions
from btrfs_ublk.image.documents import CONFIG, MANIFEST, to_bytes
from btrfs_ublk.image.indexed import index_image
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.reference import LayoutName
from btrfs_ublk.units import MIB

_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_TIMEOUT_S = 600.0


def tables(document: Document) -> list[Table]:
    """Make a table of medians and best values."""

    def rate(key: str, per: str) -> Callable[[Any], float]:
        return lambda turns: median_of(turns, key) / median_of(turns, per) / 1e6

    columns = [
        TURNS,
        Column("s", "s", 2, best=True),
        Column("CPU s", "cpu_s", 2, best=True),
        Column("MB/s of the tar", rate("tar_bytes", "s")),
        Column("MB of the tar a CPU s", rate("tar_bytes", "cpu_s")),
        Column("MB of the layer a CPU s", rate("layer_bytes", "cpu_s")),
        Column("index, % of the layer", "index_percent", 2),
        Column("pack, kB", "pack_bytes", 0, 1e-3),
        LOAD,
    ]
    names = {
        "work": lambda x: str(x["work"]),
        "layer, MB": lambda x: number(x["layer_bytes"] / 1e6, 1),
    }
    title = "Indexing a gzip layer: median (best)"
    return [table(title, document["results"], names, columns)]


def _image(tree: Path, path: Path) -> tuple[LayoutName, Path, int]:
    """Make a layout; return also its layer, and the tar's bytes."""
    made = path / "layer"
    argv: list[str | Path] = ["tar", "--sort=name", "--gzip", "-C", tree]
    argv += ["-c", "-f", made, "."]
    run_program(argv, timeout_s=_TIMEOUT_S)
    found, tar_bytes = hashlib.sha256(), 0
    with gzip.open(made) as plain:
        while part := plain.read(MIB):
            found.update(part)
            tar_bytes += len(part)
    layout = Layout.made(path / "source")
    config = {"os": "linux", "architecture": "amd64"}
    diff_ids = [f"sha256:{found.hexdigest()}"]
    rootfs = {"rootfs": {"type": "layers", "diff_ids": diff_ids}}
    layer = layout.take(made, _LAYER)
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": dict(layout.add(CONFIG, to_bytes(config | rootfs)).raw),
        "layers": [dict(layer.raw)],
    }
    layout.tag(layout.add(MANIFEST, to_bytes(document)), "it")
    return LayoutName(layout.path, "it"), layout.blob(layer.digest), tar_bytes


def _measured(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    def cpu_s() -> float:
        both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(each.ru_utime + each.ru_stime for each in both)

    load, before_s, began_s = os.getloadavg()[0], cpu_s(), monotonic()
    done = work()
    return done, {
        "s": monotonic() - began_s,
        "cpu_s": cpu_s() - before_s,
        "load": load,
    }


@study(
    "indexing",
    click.option(
        "--tree",
        type=PathType(),
        default=Path("/usr/bin"),
        help="What the layer has.",
    ),
    repeats=3,
    in_memory=True,
    recorded=("tree",),
)
def command(run: Run, tree: Path) -> None:
    """Index an image of one gzip layer, and decompress that. Needs no privileges."""
    with tempfile.TemporaryDirectory(dir=run.parent) as directory:
        name, layer, tar_bytes = _image(tree, Path(directory))
        about = {"tar_bytes": tar_bytes, "layer_bytes": layer.stat().st_size}
        nothing = {"index_percent": "-", "pack_bytes": "-"}
        unpack: list[str | Path] = ["gzip", "--test", layer]
        for turn in run.turns():
            run.wait_until_quiet()
            _, taken = _measured(lambda: run_program(unpack, timeout_s=_TIMEOUT_S))
            run.add({"work": "gzip --test", **about, **nothing, **taken})
            run.wait_until_quiet()
            index = partial(
                index_image, name, Path(directory, f"index-{turn}"), BuildOptions()
            )
            made, taken = _measured(index)
            percent = 100 * made.index_bytes / made.layer_bytes
            sizes = {"index_percent": percent, "pack_bytes": made.pack_bytes}
            run.add({"work": "image index", **about, **sizes, **taken})


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.indexing")
