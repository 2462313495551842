"""``btrfs-ublk volume``"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from btrfs_ublk.entry import completing, json_option, print_rows
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.interrupts import too_late
from btrfs_ublk.progress import progress
from btrfs_ublk.units import exact_size, format_size, parse_block_size, parse_size
from btrfs_ublk.volumes import (
    KeptVolume,
    VolumeDefinition,
    VolumeFile,
    clone_in_volume,
    down_volume,
    find_definition,
    list_volumes,
    read_definition,
    remove_volume,
    show_volume,
    up_volume,
)
from btrfs_ublk.volumes.clone import unmapped_bytes
from btrfs_ublk.volumes.definition import parse_read_ahead
from btrfs_ublk.volumes.down import may_be_up
from btrfs_ublk.volumes.store import (
    VOLUMES_DIRECTORY,
    VOLUMES_VARIABLE,
    volume_directories,
    volume_directory,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

_base = click.option(
    "--base",
    type=click.Path(path_type=Path),
    help=f"Where volumes are kept.  [{VOLUMES_VARIABLE}, else {VOLUMES_DIRECTORY}]",
)
_name = click.argument(
    "name",
    shell_complete=completing(lambda: (x.name for x in volume_directories())),
)


@click.group("volume")
def command() -> None:
    """Have lazy volumes that keep their data, also after a reboot.

    A volume has a NAME, as a device has, and a device of that name while it is up.
    Files are added to it whose content is elsewhere: it arrives when it is read. What
    is written stays with the volume's other data, in a directory of its own.
    """


def _defining_options(function: _Function) -> _Function:
    """What says how a volume is to be; each None when it is not given."""
    for option in reversed(
        [
            click.option(
                "--size",
                metavar="SIZE",
                help="Of the virtual data: as much can be added.  [64T]",
            ),
            click.option(
                "--writable",
                metavar="SIZE",
                help="Of the sparse image that takes what is written.  [1G]",
            ),
            click.option(
                "--mount",
                type=click.Path(path_type=Path),
                help="The mount point.  [/run/btrfs-ublk/volumes/NAME]",
            ),
            click.option(
                "--front-end",
                type=click.Choice(["auto", "ublk", "fuse"]),
                help="How its blocks are served.  [auto]",
            ),
            click.option(
                "--realtime/--no-realtime",
                default=None,
                help="The server's threads run before all that is not real-time.",
            ),
            click.option(
                "--queues",
                type=int,
                help="Queues of the device, and so threads of the server; 0: its own"
                " choice.  [0]",
            ),
            click.option(
                "--depth",
                type=int,
                help="Requests in flight per queue; 0: the server's own choice.  [0]",
            ),
            click.option(
                "--cache",
                type=click.Path(path_type=Path),
                help="A directory for what was fetched.  [one of its own]",
            ),
            click.option(
                "--cache-max", metavar="SIZE", help="Of the cache; 0: none.  [no cap]"
            ),
            click.option(
                "--read-ahead",
                metavar="SIZE",
                help="What one page fault fetches; or kernel: as btrfs has it."
                "  [128K]",
            ),
            click.option(
                "--deadline",
                type=click.FloatRange(0, 1e6),
                metavar="SECONDS",
                help="Until a read that no source answers fails; 0: never.  [30]",
            ),
            click.option(
                "--add-file",
                "files",
                multiple=True,
                metavar="PATH=URL",
                help="A file of the volume, and where its content is: http, https, s3,"
                " oci, /PATH, or JSON. May be repeated.",
            ),
        ]
    ):
        function = option(function)
    return function


@command.command()
@_name
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    help="A definition (TOML) instead of options.",
)
@_defining_options
@_base
@json_option
def up(
    name: str,
    file: Path | None,
    base: Path | None,
    as_json: bool,
    files: tuple[str, ...],
    **options: Any,
) -> None:
    """Mount a volume, and print where it is.

    It is made when there is none of that name. What it is to be stands in --file,
    else in /etc/btrfs-ublk/volumes/NAME.toml, else in the options, which are kept with
    its data: next time, NAME will do. Repeated, it changes nothing; new files are added
    also while it is up.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if file is not None:
        definition = read_definition(file)  # whatever the others say
    else:
        found = find_definition(name, base=base)
        definition, file = found.definition, found.file
    if file is not None and (given or files):
        first = next(iter(given), "add-file").replace("_", "-")
        raise UsageError(
            f"volume {name!r} is defined in {file}, which --{first} cannot change",
            hint="write it there",
        )
    definition = _changed(definition, given)
    definition = definition.with_files([VolumeFile.parse(text) for text in files])
    with progress(f"bring volume {name} up"):
        volume = up_volume(name, definition, base=base, made=too_late)
    click.echo(json.dumps(volume.to_dict()) if as_json else volume.mount)


def _changed(definition: VolumeDefinition, options: dict[str, Any]) -> VolumeDefinition:
    changes: dict[str, Any] = {}
    for option, value in options.items():
        match option:
            case "size" | "writable":
                changes[f"{option}_bytes"] = parse_block_size(value, what=f"--{option}")
            case "cache_max":
                changes["cache_max_bytes"] = (
                    parse_size(value, what="--cache-max") or None
                )
            case "read_ahead":
                changes["read_ahead_bytes"] = parse_read_ahead(
                    value, what="--read-ahead"
                )
            case "queues" | "depth":
                changes[option] = value or None
            case "mount" | "cache":
                changes[option] = Path(os.path.abspath(value))
            case "deadline":
                changes["deadline_s"] = value or None
            case _:
                changes[option] = value
    return replace(definition, **changes)


@command.command()
@_name
@_base
@json_option
def down(name: str, base: Path | None, as_json: bool) -> None:
    """Unmount a volume, and keep its data.

    Its device goes as well. Refused while somebody uses it: it says who. Also puts in
    order what a killed command left.
    """
    with progress(f"take volume {name} down"):
        was_up = down_volume(name, base=base)
    if as_json:
        result = "down" if was_up else "was down"
        click.echo(json.dumps({"name": name, "result": result}))
    elif not was_up:
        click.echo(f"volume {name} was down", err=True)


@command.command()
@_name
@click.option("--yes", is_flag=True, help="Do not ask.")
@_base
@json_option
def remove(name: str, yes: bool, base: Path | None, as_json: bool) -> None:
    """Remove a volume that is down, with its data.

    All that was written to it is lost. Asks before, without --yes.
    """
    volume = show_volume(name, base=base)
    if not yes:
        if may_be_up(volume_directory(name, base)):
            raise LeftoverError(
                f"volume {name!r} is {volume.state}: only one that is down is removed",
                hint=f"first: btrfs-ublk volume down {name}",
            )
        lost = "all that was written to it (how much is unknown)"
        if volume.used_bytes is not None:
            size = format_size(volume.used_bytes)
            lost = f"{size} that were written to the volume"
        _confirm(f"Remove {volume.directory}, with {lost}?")
    remove_volume(name, base=base)
    if as_json:
        click.echo(json.dumps({"name": name, "result": "removed"}))


def _confirm(question: str) -> None:
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort as error:
        if isinstance(error.__context__, EOFError):
            raise UsageError("nobody answers", hint="use --yes") from error
        raise


@command.command("list")
@_base
@json_option
def list_command(base: Path | None, as_json: bool) -> None:
    """List all volumes, and how they are.

    up, down, changing (a command works on it), broken (neither up nor down, or not
    whole), damaged (its files make no sense): `volume status` says why.
    """
    volumes = list_volumes(base=base)
    if as_json:
        click.echo(json.dumps([volume.to_dict() for volume in volumes], indent=2))
        return
    rows = [("NAME", "STATE", "MOUNT", "DEVICE", "SIZE", "USED", "FILES")]
    for volume in volumes:
        rows.append(
            (
                volume.name,
                volume.state,
                str(volume.mount or "-"),
                str(volume.device or "-"),
                _exact(volume.size_bytes),
                _rough(volume.used_bytes),
                str(len(volume.files)),
            )
        )
    print_rows(rows)


@command.command()
@_name
@_base
@json_option
def status(name: str, base: Path | None, as_json: bool) -> int:
    """Show a volume, and what is in it.

    Exit status 0: it is up; 1: it is down, or broken (it says why).
    """
    volume = show_volume(name, base=base)
    if as_json:
        click.echo(json.dumps(volume.to_dict(), indent=2))
    else:
        _print(volume)
    return 0 if volume.is_up else 1


@command.command()
@_name
@click.argument("path")
@click.option("--offset", required=True, metavar="SIZE", help="In the virtual data.")
@click.option("--length", required=True, metavar="SIZE", help="Any number of bytes.")
@_base
@json_option
def clone(
    name: str, path: str, offset: str, length: str, base: Path | None, as_json: bool
) -> None:
    """Make a file of a range of the virtual data.

    PATH is where it will be in the volume; nothing is there yet. For what was mapped by
    hand: `btrfs-ublk map add NAME …` prints offset and length. No data are moved. Says
    how much of it is not mapped.
    """
    size_bytes = parse_size(length, what="--length")
    at = parse_size(offset, what="--offset")
    made = clone_in_volume(name, path, offset=at, size_bytes=size_bytes, base=base)
    with suppress(BtrfsUblkError):  # the file is there, whatever the server says
        if missing := unmapped_bytes(name, offset=at, size_bytes=size_bytes):
            click.echo(
                f"warning: {missing} of {size_bytes} bytes are not mapped: reading "
                f"them fails (EIO) until they are: btrfs-ublk map add {name}",
                err=True,
            )
    keys = {"path": str(made), "offset": at, "size_bytes": size_bytes}
    click.echo(json.dumps(keys) if as_json else made)


def _exact(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else exact_size(size_bytes)


def _rough(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _print(volume: KeptVolume) -> None:
    lines: list[tuple[str, object]] = [("state", volume.state)]
    if volume.reason:
        lines.append(("because", volume.reason))
    if volume.failing:
        lines.append(("failing", volume.failing))
    lines += [
        ("mount", volume.mount or "-"),
        ("device", volume.device or "-"),
        ("front end", volume.front_end or "-"),
        ("fsid", volume.fsid or "-"),
        ("virtual data", _exact(volume.size_bytes)),
        ("mapped", _rough(volume.mapped_bytes)),
        ("writable", _exact(volume.writable_bytes)),
        ("used", _rough(volume.used_bytes)),
        ("cache", volume.cache or "-"),
        ("kept in", volume.directory),
    ]
    for name, value in lines:
        click.echo(f"{name:14} {value}")
    for file in volume.files:
        gone = ", removed since" if file.present is False else ""
        size = format_size(file.size_bytes)
        click.echo(f"{'file':14} {file.path}: {size} from {file.origin}{gone}")
