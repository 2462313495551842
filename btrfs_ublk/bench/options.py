"""Command-line options shared by benchmarks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from btrfs_ublk.base.capabilities import sparse_directory
from btrfs_ublk.base.entry import CountType, PathType, SecondsType, json_option, stacked
from btrfs_ublk.units import EIB, parse_block_size

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The size that the largest seed's image may need.
_SPARSE_BYTES = 8 * EIB - 4096

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
}
COUNT = CountType(min=1)


def parse_size(_context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Parse an option of a size: "4096", "16K", "4E"."""
    return parse_block_size(value, what=parameter.opts[-1])


def _parent(
    _context: click.Context, _parameter: click.Parameter, value: Path | None
) -> Path:
    return value or sparse_directory(_SPARSE_BYTES, candidates=("/dev/shm", "/tmp"))


#: The option --parent: an existing directory for the images.
parent_option = click.option(
    "--parent",
    type=PathType(exists=True, file_okay=False),
    callback=_parent,
    help="Directory for the images, on tmpfs, XFS or btrfs.  [/dev/shm]",
)

#: The option --directory: an existing one, in memory, as a disk would be measured, too.
memory_directory_option = click.option(
    "--directory",
    "parent",
    type=PathType(file_okay=False, exists=True),
    default="/dev/shm",
    help="Where objects, maps and caches are.",
)

#: The option --front-end, for benchmarks that need one only.
front_end_option = click.option(
    "--front-end", type=click.Choice(["auto", "ublk", "fuse"]), default="auto"
)


def size_option(default: str, help: str) -> Callable[[_Function], _Function]:
    """Add --size, in bytes: the size of what is read."""
    return click.option(
        *("--size", "size_bytes"),
        default=default,
        callback=parse_size,
        metavar="SIZE",
        help=help,
    )


def runtime_option(default_s: float) -> Callable[[_Function], _Function]:
    return click.option(
        *("--runtime", "runtime_s"), type=SecondsType(min=0.1), default=default_s
    )


def common_options(
    repeats: int | None = None, in_memory: bool = False
) -> Callable[[_Function], _Function]:
    """Add --repeats, if it has a default; --parent, or --directory if the benchmark is
    ``in_memory``; and --json.
    """
    added = [memory_directory_option if in_memory else parent_option]
    if repeats is not None:
        turns = ("--repeats", "--repeat", "repeats")
        added.insert(
            0, click.option(*turns, type=COUNT, default=repeats, help="Turns of each.")
        )

    return stacked(*added, json_option)


def progress(text: str) -> None:
    """Print the progress of a long benchmark to stderr."""
    click.echo(text, err=True)
