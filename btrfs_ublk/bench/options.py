"""Command-line options that benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from btrfs_ublk.capabilities import sparse_directory
from btrfs_ublk.entry import json_option
from btrfs_ublk.seed import Seed
from btrfs_ublk.units import EIB, TIB, format_size, parse_block_size

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: What the largest seed's image may need.
_SPARSE_BYTES = 8 * EIB - 4096

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
}
COUNT = click.IntRange(min=1)


class SeedSize(NamedTuple):
    """Bytes; chunks of None are as long as can be."""

    virtual_data_size: int
    chunk_bytes: int | None = None


def parse_sizes(
    _context: click.Context, parameter: click.Parameter, value: str | Sequence[str]
) -> int | tuple[int, ...]:
    """Callback of an option for one size or several: "4096", "16K", "4E"."""
    what = parameter.opts[-1]
    if isinstance(value, str):
        return parse_block_size(value, what=what)
    return tuple(parse_block_size(text, what=what) for text in value)


def parse_seed_sizes(
    _context: click.Context, parameter: click.Parameter, value: Sequence[str]
) -> tuple[SeedSize, ...]:
    """Callback: virtual data, and after a colon the length of chunks: "4E", "4T:4G"."""
    return tuple(_parse_seed_size(text, parameter.opts[-1]) for text in value)


def _parse_seed_size(text: str, what: str) -> SeedSize:
    size, colon, chunk = text.partition(":")
    chunk_bytes = parse_block_size(chunk, what=f"chunk of {what}") if colon else None
    return SeedSize(parse_block_size(size, what=what), chunk_bytes)


def seed_name(virtual_data_bytes: int) -> str:
    """As in the table of sizes: "275 GiB", "4 EiB"; 4 digits would hide the rest."""
    for unit, letter in ((EIB, "EiB"), (TIB, "TiB")):
        if virtual_data_bytes % unit == 0:
            return f"{virtual_data_bytes // unit} {letter}"
    return format_size(virtual_data_bytes)


def chunks_text(seed: Seed) -> str:
    """ "16449 + stub" """
    return f"{seed.chunks}{' + stub' if seed.stub_chunk else ''}"


def _parent(
    _context: click.Context, _parameter: click.Parameter, value: Path | None
) -> Path:
    return value or sparse_directory(_SPARSE_BYTES, candidates=("/dev/shm", "/tmp"))


#: --parent: an existing directory for the images.
parent_option = click.option(
    "--parent",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    callback=_parent,
    help="Directory for the images, on tmpfs, XFS or btrfs.  [/dev/shm]",
)

#: --directory: an existing one; a disk would be measured as well.
memory_directory_option = click.option(
    "--directory",
    "parent",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default="/dev/shm",
    help="Where objects, maps and caches are.",
)

#: --front-end, of which a benchmark needs one only.
front_end_option = click.option(
    "--front-end", type=click.Choice(["auto", "ublk", "fuse"]), default="auto"
)


def size_option(default: str) -> Callable[[_Function], _Function]:
    """--size, in bytes: of what is read."""
    return click.option(
        *("--size", "size_bytes"), default=default, callback=parse_sizes, metavar="SIZE"
    )


def common_options(repeats: int | None = None) -> Callable[[_Function], _Function]:
    """--repeats, unless there is no default of it; --parent, --patience and --json."""
    turns = click.option(
        "--repeats", type=COUNT, default=repeats, help="Turns of each."
    )
    added = [
        *([] if repeats is None else [turns]),
        parent_option,
        click.option(
            "--patience",
            "patience_s",
            type=click.FloatRange(min=0),
            default=0.0,
            metavar="SECONDS",
            help="How long each turn may wait for a quiet machine.",
        ),
        json_option,
    ]

    def decorate(function: _Function) -> _Function:
        for option in reversed(added):
            function = option(function)
        return function

    return decorate


def progress(text: str) -> None:
    """Say on stderr how far a long benchmark is."""
    click.echo(text, err=True)
