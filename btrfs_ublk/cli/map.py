"""``btrfs-ublk map``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.base.entry import (
    CountType,
    PathType,
    SizeType,
    json_option,
    print_found,
    read_text,
    say_resolved,
)
from btrfs_ublk.base.progress import progress
from btrfs_ublk.base.urls import shown_value
from btrfs_ublk.cli.map_options import device_argument, stats_lines, which_map
from btrfs_ublk.cli.mirror_options import mirror_options, mirrors_of, parse_json
from btrfs_ublk.content import (
    Addition,
    Mapping,
    SourceKeys,
    digest_file,
    digest_indexed,
    make_index,
)
from btrfs_ublk.content.digests import DEFAULT_UNIT_BYTES, parse_unit
from btrfs_ublk.content.index import DEFAULT_SPACING_BYTES
from btrfs_ublk.device import device_map
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import exact_size, format_size, parse_size

_start = click.option(
    "--start",
    default="0",
    type=SizeType(),
    show_default=True,
    help="Where in the virtual data to begin.",
)
_end = click.option(
    "--end", type=SizeType(), help="Where in the virtual data to end.  [at their end]"
)


@click.group("map")
def command() -> None:
    """Say where a device's data come from.

    A DEVICE is named as by `btrfs-ublk device list`. Its lazy segments have maps, which
    say which ranges come from which sources.

    Mappings are only ever added: what is mapped reads the same for ever.
    """


@command.command()
@device_argument
@click.option(
    "--offset",
    default="auto",
    show_default=True,
    metavar="SIZE|auto",
    help="Offset in the virtual data; auto: the lowest place that is free.",
)
@click.option(
    "--length", type=SizeType(), help="How much to map.  [the rest of the source]"
)
@click.option(
    "--source-offset",
    default="0",
    show_default=True,
    type=SizeType(),
    help="Where in the source the mapping begins.",
)
@mirror_options
@click.option(
    "--source",
    "source_path",
    type=PathType(),
    help="A source's description (JSON; - is standard input).",
)
@click.option("--size", type=SizeType(), help="Size of the source.  [it is asked for]")
@click.option(
    "--unit", type=SizeType(), help="What is fetched as a whole, 4K to 1M.  [256K]"
)
@click.option(
    "--digests", type=PathType(), help="A file of `map digest`, which the server reads."
)
@click.option("--root", metavar="HEX", help="The root digest that they must have.")
@click.option(
    "--codec",
    metavar="NAME",
    help="What the source is compressed with: gzip, zstd. Needs --index.",
)
@click.option(
    "--index", type=PathType(), help="A file of `map index`, which the server reads."
)
@which_map
@click.pass_context
def add(
    ctx: click.Context, /, device: str, path: str | None, as_json: bool, **options: Any
) -> None:
    """Map a range of the virtual data to a source.

    Prints offset and length, in bytes; the range can be read at once. Repeated, it
    changes nothing, and prints the same.

    For example: btrfs-ublk map add NAME --url http://localhost/image --size 1G
    """
    mirrors = mirrors_of(ctx)
    client = device_map(device, path=path)
    sources = [_source(mirrors, options)]
    additions = [_addition(options)]
    sources = client.resolve(sources, resolved=say_resolved)
    added = client.add(sources, additions)
    lines = [
        f"{x.offset} {x.length} {'already mapped' if x.existed else 'mapped'}"
        for x in added
    ]
    print_found([vars(one) for one in added], lines, as_json=as_json)


def _source(mirrors: list[SourceKeys], options: dict[str, Any]) -> SourceKeys:
    source_path = options["source_path"]
    if (source_path is None) == (not mirrors):
        raise UsageError(
            "one source is needed",
            hint="--file, --url, --url-file, --s3, --oci or --mirror; or --source",
        )
    if source_path is None:
        source: SourceKeys = mirrors[0] if len(mirrors) == 1 else {"mirrors": mirrors}
    else:
        source = parse_json(read_text(source_path), str(source_path))
    if not isinstance(source, dict):
        raise UsageError(f"{source_path}: not a JSON object")
    more = {
        "size": options["size"],
        "unit": options["unit"],
        "digests": _file(options["digests"]),
        "root": options["root"],
        "codec": options["codec"],
        "index": _file(options["index"]),
    }
    return source | {key: value for key, value in more.items() if value is not None}


def _file(path: Path | None) -> dict[str, str] | None:
    """Describe a file that the server reads."""
    return None if path is None else {"path": str(path.absolute())}


def _addition(options: dict[str, Any]) -> Addition:
    offset = options["offset"]
    return Addition(
        offset=None if offset == "auto" else parse_size(offset, what="--offset"),
        length=options["length"],
        source_offset=options["source_offset"],
    )


@command.command("list")
@device_argument
@_start
@_end
@which_map
def list_command(
    device: str, start: int, end: int | None, path: str | None, as_json: bool
) -> None:
    """List what is mapped, and what vouches for it.

    In the column DIGESTS,
    "given": digests that came with the source; "pinned": those of what was fetched
    first, so it is unverified until then; "computed": nothing needs to.
    """
    _check_range(start, end)
    mappings = device_map(device, path=path).list(start=start, end=end)
    if as_json:
        # One line for each mapping, as there may be many; together they are one array.
        before = "["
        for mapping in mappings:
            click.echo(f"{before}{json.dumps(vars(mapping))}", nl=False)
            before = ",\n"
        click.echo("]" if before != "[" else "[]")
        return
    _print_row(("OFFSET", "LENGTH", "SOURCE", "SOURCE OFFSET", "DIGESTS"))
    for mapping in mappings:
        _print_row(_row(mapping))


def _row(mapping: Mapping) -> tuple[str, ...]:
    numbers = mapping.offset, mapping.length, mapping.source, mapping.source_offset
    return (*map(str, numbers), mapping.digests)


def _print_row(words: tuple[str, ...]) -> None:
    widths = 20, 14, 8, 16, 0
    padded = zip(words, widths, strict=True)
    click.echo(" ".join(word.ljust(width) for word, width in padded).rstrip())


@command.command()
@device_argument
@click.argument("offset", required=False, type=SizeType())
@click.option(
    "--source",
    "number",
    type=CountType(0),
    help="The source of that number, instead of an OFFSET.",
)
@which_map
def show(
    device: str, offset: int | None, number: int | None, path: str | None, as_json: bool
) -> None:
    """Print a mapping, and its source.

    The mapping is the one at OFFSET of the virtual data.
    """
    if (offset is None) == (number is None):
        raise UsageError("either OFFSET or --source is needed")
    client = device_map(device, path=path)
    found = shown_value(client.show(offset=offset, source=number))
    lines = [
        f"{name:16} {json.dumps(value) if isinstance(value, dict) else value}"
        for part in found.values()
        for name, value in part.items()
    ]
    print_found(found, lines, as_json=as_json)


@command.command()
@device_argument
@click.option(
    "--ask", is_flag=True, help="Also ask all mirrors whether they have what is mapped."
)
@which_map
def verify(device: str, ask: bool, path: str | None, as_json: bool) -> int:
    """Check that the map is whole.

    And that its digests are those that came with the sources. Exit status 1: it is not.
    """
    with progress("checking the map"):
        problems = list(device_map(device, path=path).verify(ask_mirrors=ask))
    lines = [
        ("" if problem.source is None else f"source {problem.source}: ") + problem.text
        for problem in problems
    ]
    told = [vars(problem) for problem in problems]
    print_found(told, lines or ["all is well"], as_json=as_json)
    return 1 if problems else 0


@command.command()
@device_argument
@which_map
def stats(device: str, path: str | None, as_json: bool) -> None:
    """Print how much is mapped, and was fetched."""
    found = device_map(device, path=path).stats()
    print_found(found, stats_lines(found), as_json=as_json)


@command.command()
@click.argument("file", type=PathType(exists=True, dir_okay=False))
@click.option(
    "--unit",
    default=exact_size(DEFAULT_UNIT_BYTES),
    show_default=True,
    type=SizeType(parse_unit),
    help="What is fetched as a whole, 4K to 1M; the same for `map add --unit`.",
)
@click.option(
    "--index",
    type=PathType(),
    help="FILE is compressed, and this is its index, of `map index`.",
)
@click.option(
    "-o",
    "--output",
    type=PathType(),
    help="Where to put the digests, as `map add --digests` takes them.",
)
@json_option
def digest(
    file: Path, unit: int, index: Path | None, output: Path | None, as_json: bool
) -> None:
    """Print the digest that verifies a file.

    A server that has the digests of FILE verifies what it fetches of it from the first
    read on. Prints their root, which covers them all; --output keeps them. Of a
    compressed file, they are those of what is read.
    """
    try:
        total = file.stat().st_size if index is None else None
        with progress(f"reading {file.name}", total=total, in_bytes=True) as task:
            if index is None:
                digests = digest_file(file, unit_bytes=unit, progress=task.advance)
            else:
                digests = digest_indexed(
                    file, index, unit_bytes=unit, progress=task.advance
                )
    except OSError as error:
        raise UsageError(f"{error.filename or file}: {error.strerror}") from error
    if output is not None:
        digests.write(output)
    found = {"size": digests.size_bytes, "unit": unit, "root": digests.root}
    print_found(found, [digests.root], as_json=as_json)


@command.command()
@click.argument("file", type=PathType(exists=True, dir_okay=False))
@click.option(
    "--codec",
    type=click.Choice(["gzip", "zstd"]),
    required=True,
    help="How it is compressed.",
)
@click.option(
    "--spacing",
    default=exact_size(DEFAULT_SPACING_BYTES),
    show_default=True,
    type=SizeType(),
    help="How far apart the points are where reading may begin, in gzip: fewer make the"
    " index smaller, and reads slower. Zstandard has one for each frame.",
)
@click.option(
    "-o",
    "--output",
    type=PathType(),
    required=True,
    help="Where to put the index, as `map add --index` takes it.",
)
@json_option
def index(file: Path, codec: str, spacing: int, output: Path, as_json: bool) -> None:
    """Make the index of a compressed file.

    With it, a server reads any part of FILE, which stays compressed where it is: it
    fetches and decompresses only what a unit needs. FILE is read to its end.

    For example: btrfs-ublk map index layer.tar.gz --codec gzip -o layer.index
    """
    try:
        with progress(f"reading {file.name}"):
            made = make_index(file, output, codec=codec, spacing_bytes=spacing)
    except OSError as error:
        raise UsageError(f"{error.filename or output}: {error.strerror}") from error
    line = f"{format_size(made.size)} come of {format_size(made.coded_size)};"
    line += f" {made.points} points take {format_size(made.index_size)}"
    print_found(vars(made), [line], as_json=as_json)


def _check_range(start: int | None, end: int | None) -> None:
    if start is not None and end is not None and start > end:
        raise UsageError(
            f"--start {exact_size(start)} is beyond --end {exact_size(end)}",
            hint="exchange the two",
        )
