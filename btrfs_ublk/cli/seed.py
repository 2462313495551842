"""``btrfs-ublk seed``"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.base.entry import (
    CountType,
    PathType,
    SizeType,
    json_option,
    print_found,
)
from btrfs_ublk.base.progress import progress
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.new_file import write_new
from btrfs_ublk.seed import (
    DEFAULT_FILENAME,
    MEGA_EXTENT,
    STRATEGIES,
    Seed,
    make_seed_by,
)
from btrfs_ublk.seed.check import check_with_progs
from btrfs_ublk.seed.inspect import inspect_seed
from btrfs_ublk.server import LazySegment
from btrfs_ublk.units import format_size, parse_block_size


@click.group("seed")
def command() -> None:
    """Make and check the file systems that sprouts grow on.

    A seed is a btrfs with one file, the virtual data, whose blocks a block server
    answers; its image has the metadata. Sizes (SIZE) are bytes, or have a suffix of
    powers of 1024: 4096, 256K, 1T, 4E.
    """


@command.command()
@click.argument("path", type=PathType())
@click.option(
    "--strategy",
    type=click.Choice(list(STRATEGIES)),
    default=MEGA_EXTENT,
    show_default=True,
    help="fallocate: by mkfs.btrfs and the kernel, 5G to 300G; needs root.",
)
@click.option(
    "--virtual-data-size",
    default="4E",
    show_default=True,
    type=SizeType(parse_block_size),
    help="Size of the virtual data; a larger one costs next to nothing.",
)
@click.option(
    "--virtual-data-filename",
    default=DEFAULT_FILENAME,
    show_default=True,
    metavar="NAME",
    help="Name of the file of virtual data.",
)
@click.option(
    *("--chunk-size", "chunk_bytes"),
    type=SizeType(parse_block_size),
    help="Length of a chunk.  [255T]",
)
@click.option(
    "--metadata-profile",
    type=click.Choice(["single", "dup"]),
    help="Metadata once or twice; sprouts inherit it.  [single]",
)
@click.option(
    "--inherit-nodatasum/--no-inherit-nodatasum",
    default=None,
    help="Whether new files have no checksums, and so take clones.  [they have them]",
)
@click.option("--label", help="Label of the file system.")
@click.option("--fsid", type=click.UUID, help="UUID of the file system.  [random]")
@click.option("--device-uuid", type=click.UUID, help="UUID of the device.  [derived]")
@click.option(
    "--time", type=CountType(0), help="All timestamps, seconds since 1970.  [now]"
)
@click.option(
    "--metadata-only",
    is_flag=True,
    help="Keep only what a server needs: a few MiB on any file system.",
)
@click.option(
    "--force", is_flag=True, help="Replace PATH, and what --description names."
)
@click.option(
    "--description",
    type=PathType(),
    help="Where to put the description of a device for it, whose virtual data are a"
    " lazy segment: as `device up` takes it.",
)
@click.option(
    "--map",
    "map_path",
    type=PathType(),
    help="Of that segment: the file that says what is mapped.",
)
@click.option(
    "--cache",
    type=PathType(),
    help="Of that segment: the directory that keeps what was fetched.",
)
@json_option
def create(
    path: Path,
    strategy: str,
    force: bool,
    description: Path | None,
    map_path: Path | None,
    cache: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Write a seed image.

    PATH is where it goes. The default strategy needs no privileges. With --description
    it also writes what `btrfs-ublk device up` takes, for data that are fetched when
    they are read: see `btrfs-ublk map add`.

    \b
    For example:
      btrfs-ublk seed create seed.img --virtual-data-size 1T --metadata-only
    """
    if (description is None) != (map_path is None) or (cache and not map_path):
        raise UsageError("--description and --map need each other, --cache needs both")
    if description is not None and not force and description.exists():
        raise UsageError(f"{description} exists", hint="--force replaces it")
    if cache is not None and os.path.lexists(cache) and not cache.is_dir():
        raise UsageError(
            f"cache {cache} is not a directory",
            hint="name a directory; one that is not there is made by the server",
        )
    seed = make_seed_by(strategy, path, force=force, **given)
    if description is not None and map_path is not None:
        _describe(seed, description, map_path, cache)
    virtual = seed.virtual_data
    lines = [
        f"{seed.path}: btrfs seed {seed.fsid}",
        f"  virtual data  {format_size(virtual.size)} in {virtual.filename}",
        f"  chunks        {seed.chunks} of up to {format_size(seed.chunk_bytes)}",
        f"  metadata      {format_size(seed.metadata_bytes)}",
    ]
    print_found(seed.to_dict(), lines, as_json=as_json)


def _describe(seed: Seed, path: Path, map_path: Path, cache: Path | None) -> None:
    segment = LazySegment(
        offset=0,
        length=seed.virtual_data.size,
        map=str(map_path.absolute()),
        cache=None if cache is None else str(cache.absolute()),
    )
    try:
        text = seed.description([segment]).to_json() + "\n"
        write_new(path, text.encode(), replace=True)
    except OSError as error:
        seed.path.unlink()
        raise BtrfsUblkError(f"cannot write {path}: {error.strerror}") from None


@command.command()
@click.argument("path", type=PathType(exists=True, dir_okay=False))
@json_option
def inspect(path: Path, as_json: bool) -> None:
    """Print the layout of a seed, or of any btrfs.

    Sizes, flags, chunks, strategy, virtual data, of a btrfs that is on one device. PATH
    is an image or a device. --json has exact numbers.
    """
    layout = inspect_seed(path)
    print_found(layout, _described(layout), as_json=as_json)


def _described(found: dict[str, Any]) -> Iterator[str]:
    """Describe a layout, or a part of it, a line for each key."""
    for name, value in found.items():
        parts = value if name == "chunks" else [value]
        for part in parts:
            text = _text(name, part)
            # Texts from an image must not move the cursor or set colours of a terminal.
            yield f"{name.replace('_', ' '):20} " + re.sub(
                r"[\0-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", text
            )


def _text(name: str, value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{key} {_text(key, x)}" for key, x in value.items())
        case list() | tuple():
            return " ".join(map(str, value)) or "none"
        case int() if name.endswith("bytes") or name == "size":
            return format_size(value)
    return "none" if value is None else str(value)


@command.command()
@click.argument("path", type=PathType(exists=True, dir_okay=False))
@json_option
def check(path: Path, as_json: bool) -> int:
    """Run `btrfs check` on a seed, offline.

    An image that was made with --metadata-only gets its full size first, in memory.
    Writes nothing. PATH is an image or a device that is not mounted. Exit status: 0 it
    is sound, 1 it is not, or no seed, or could not be checked.
    """
    with progress("checking the seed"):
        layout, progs = inspect_seed(path), check_with_progs(path)
    clean = layout["seeding"] and progs.clean is True
    reason = progs.reason if layout["seeding"] else "SEEDING is not set: no seed"
    answer = {"path": str(path), "clean": clean, "seeding": layout["seeding"]}
    answer |= {"strategy": layout["strategy"], "btrfs_check": asdict(progs)}
    result = f"clean, strategy {layout['strategy']}" if clean else reason
    lines = [*(f"  {line}" for line in progs.output), f"{path}: {result}"]
    print_found(answer, lines, as_json=as_json)
    return 0 if clean else 1
