"""``btrfs-ublk cache``"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import click

from btrfs_ublk.base.entry import (
    PathType,
    SizeType,
    json_option,
    print_found,
    stacked,
)
from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import make_private
from btrfs_ublk.base.progress import progress
from btrfs_ublk.content.cache import (
    DEFAULT_DIRECTORY,
    Cache,
    Content,
    DigestOf,
    Status,
    map_digests,
)
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.ops.monitor.samples import take_samples
from btrfs_ublk.units import format_size
from btrfs_ublk.volume.store import volume_directories

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_directory = click.option(
    "-d",
    "--directory",
    type=PathType(),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Where the cache is.",
)


@click.group("cache")
def command() -> None:
    """Look after the local cache of what was fetched.

    All of it works while servers use the cache. A content is named by its KEY, 64
    hexadecimal digits, which `btrfs-ublk cache status` prints.
    """


def _cache(directory: Path) -> Cache:
    """Return an existing cache. Raises UsageError, which names those of volumes."""
    try:
        directory.stat()
    except FileNotFoundError as error:
        others = ", ".join(map(str, _caches_of_volumes()))
        raise UsageError(
            f"there is no cache '{directory}'",
            hint="name one: -d DIRECTORY"
            + (f"; volumes have: {others}" if others else ""),
        ) from error
    except OSError:
        pass  # its help explains it
    return Cache(directory)


def _caches_of_volumes() -> list[Path]:
    found = set()
    with suppress(BtrfsUblkError, OSError):
        for volume in volume_directories():
            with suppress(BtrfsUblkError):  # damaged
                found.add(volume.cache_of(volume.definition()))
    return sorted(path for path in found if path.is_dir())


@command.command("status")
@_directory
@json_option
def status(directory: Path, as_json: bool) -> int:
    """Print what is in the cache.

    For each content: how much of it is there, the size of its units, when it was used
    last, whether it is pinned, and whether a server has it open.

    Exit status 1: something in it is damaged.
    """
    found = _cache(directory).status()
    print_found(found.to_dict(), _status_lines(found), as_json=as_json)
    return 1 if found.broken else 0


def _status_lines(found: Status) -> Iterator[str]:
    yield from map(_line, found.contents)
    yield from (f"{broken.key}  damaged: {broken.error}" for broken in found.broken)
    yield (
        f"{found.directory}: {format_size(found.cached_bytes)} of "
        f"{len(found.contents)} contents; {format_size(found.free_bytes)} free"
    )


def _line(content: Content) -> str:
    share = 100 * content.cached_units / content.units
    words = [
        f"{format_size(content.cached_bytes)} of {format_size(content.size)} "
        f"({share:.0f} %)",
        f"unit {format_size(content.unit_bytes)}",
        f"used {_age(time.time() - content.last_use_s)} ago",
    ]
    words += ["pinned"] * content.pinned + ["in use"] * content.in_use
    return f"{content.key}  {', '.join(words)}"


def _age(seconds: float) -> str:
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@command.command("verify")
@_directory
@click.option(
    "--map",
    "maps",
    type=PathType(exists=True, dir_okay=False),
    multiple=True,
    help="Compare with the digests of this map.",
)
@json_option
def verify(directory: Path, maps: tuple[Path, ...], as_json: bool) -> int:
    """Compare cached units with digests, and drop wrong ones.

    Those that have no digest are compared with the checksums that they were cached
    with. What is dropped is fetched again when it is read. Without --map, which may be
    repeated, the maps of all running devices are asked.

    Exit status 1: something was wrong, or a map could not be read.
    """
    cache = _cache(directory)
    digests: dict[str, DigestOf] = {}
    unread = []
    with ExitStack() as stack:
        for path in maps or _running_maps():
            try:
                digests |= stack.enter_context(map_digests(path))
            except BtrfsUblkError as error:
                log.warning("%s; what it has digests of is not verified", error.message)
                unread.append(str(path))
        units = sum(content.cached_units for content in cache.status().contents)
        with progress("comparing cached units", total=units) as task:
            report = cache.verify(digests, progress=task.advance)
    lines = [
        *(f"{key}: unit {n} was wrong, and is dropped" for key, n in report.wrong),
        *(f"{broken.key}: damaged: {broken.error}" for broken in report.broken),
        f"{report.right} units right, {len(report.wrong)} wrong, "
        f"{report.unknown} without a digest",
    ]
    found = report.to_dict() | {"unread_maps": unread}
    print_found(found, lines, as_json=as_json)
    return 0 if report.clean and not unread else 1


def _running_maps() -> list[Path]:
    samples = take_samples()
    return [
        Path(lazy.map)
        for sample in samples
        if sample.stats
        for lazy in sample.stats.lazy
    ]


@command.command("prune")
@_directory
@click.option(
    "--to", "size", type=SizeType(), help="Evict until at most this much is left."
)
@click.option(
    "--older-than",
    "age",
    metavar="AGE",
    help="Remove what was not used for so long: 90m, 12h, 30d, 2w.",
)
@click.option(
    "--content",
    "keys",
    metavar="KEY",
    multiple=True,
    help="Remove this content; repeatable.",
)
@json_option
def prune(
    directory: Path,
    size: int | None,
    age: str | None,
    keys: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make the cache smaller.

    Pinned contents stay; what is removed is fetched again when it is read. At least one
    of --to, --older-than and --content is needed.
    """
    if size is None and age is None and not keys:
        raise UsageError("nothing to do", hint="give --to, --older-than or --content")
    age_s = None if age is None else parse_age(age)
    cache = _cache(directory)
    evicted = sum(cache.remove(key) for key in keys)
    if age_s is not None:
        evicted += sum(cache.remove_older(age_s, now_s=time.time()).values())
    if size is not None:
        evicted += cache.shrink(size)
    left = cache.status().cached_bytes
    found = {"evicted_bytes": evicted, "cached_bytes": left}
    line = f"{format_size(evicted)} removed, {format_size(left)} left"
    print_found(found, [line], as_json=as_json)


def parse_age(text: str) -> float:
    """Parse "90m", "12h" or "30d" into seconds. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise UsageError(
            f"'{text}' is not an age",
            hint="give a number with s, m, h, d or w, such as 90m or 30d",
        )
    return float(match[1]) * _SECONDS[match[2]]


@command.command("limit")
@_directory
@click.option(
    "--max", "most", type=SizeType(), help="Cap on all contents together.  [no cap]"
)
@click.option(
    "--reserve",
    type=SizeType(),
    help="Room to leave free on its file system.  [a twentieth of it]",
)
def limit(directory: Path, most: int | None, reserve: int | None) -> None:
    """Set how large the cache may get.

    All servers that use it keep to that, and what is too much is evicted now. An option
    that is left out is set to what it is in a new cache. Makes the directory where
    there is none.
    """
    if not os.path.lexists(directory):
        make_private(directory, what="cache", hint="name another one: -d DIRECTORY")
    Cache(directory).limit(max_bytes=most or 0, reserve_bytes=reserve or 0)


_pin_options = stacked(_directory, click.argument("keys", metavar="KEY...", nargs=-1))


@command.command("pin")
@_pin_options
def pin(directory: Path, keys: tuple[str, ...]) -> None:
    """Keep contents, whatever happens.

    Each KEY is of a content, which need not be there yet.
    """
    _for_all(keys, _cache(directory).pin)


@command.command("unpin")
@_pin_options
def unpin(directory: Path, keys: tuple[str, ...]) -> None:
    """Let contents be evicted again.

    Each KEY is of a content that was pinned.
    """
    _for_all(keys, _cache(directory).unpin)


def _for_all(keys: tuple[str, ...], function: Callable[[str], None]) -> None:
    if not keys:
        raise UsageError("no KEY is given", hint="btrfs-ublk cache status lists them")
    for key in keys:
        function(key)
