"""The commands of ``btrfs-ublk volume`` that add and remove single files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import PathType, json_option, say_resolved, stacked
from btrfs_ublk.base.progress import progress
from btrfs_ublk.cli.volume_options import Function, confirm, volume_name, volumes_base
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import format_size

_File = TypeVar("_File", bound=volumes.VolumeFile)

#: How the servers of files are asked.
_source_options = stacked(
    click.option(
        "--endpoint",
        metavar="URL",
        help="Of the S3 store of these files.  [AWS_ENDPOINT_URL, else Amazon's]",
    ),
    click.option(
        "--credentials-file",
        type=PathType(),
        help="For the S3 store, like ~/.aws/credentials; the server reads it.",
    ),
    click.option(
        "--basic-auth-file",
        type=PathType(),
        help="For HTTP: user:password in its first line; the server reads it.",
    ),
    click.option(
        "--ca-file",
        type=PathType(),
        help="Certificates (PEM) to trust for these files.  [the system's]",
    ),
)


def with_source_access(function: Function) -> Function:
    """Add the options that say how sources of files are asked; the command gets them as
    ``access``."""

    @wraps(function)
    def command(
        *args: Any,
        endpoint: str | None,
        credentials_file: Path | None,
        basic_auth_file: Path | None,
        ca_file: Path | None,
        **keys: Any,
    ) -> Any:
        access = volumes.Access(
            endpoint=endpoint,
            credentials_file=credentials_file,
            basic_auth_file=basic_auth_file,
            ca_file=ca_file,
        )
        return function(*args, access=access, **keys)

    return cast(Function, _source_options(command))


def entries(
    option: str, parse: Callable[[str], _File], texts: Sequence[str]
) -> list[_File]:
    """Parse the values of an option, or of an argument, which errors name."""
    try:
        return [parse(text) for text in texts]
    except UsageError as error:
        error.prefix(option)
        raise


@click.command("add-file")
@volume_name
@click.argument("file", metavar="FILE=URL")
@with_source_access
@volumes_base
@json_option
def add_file(
    name: str, file: str, access: volumes.Access, base: Path | None, as_json: bool
) -> None:
    """Add a file to a volume, and print where it is.

    FILE=URL is its path in the volume NAME, which is up, and where its content is, as
    for --add-file of `volume up`: it arrives when it is read. The definition has the
    file from then on.
    """
    (entry,) = access.given_to(entries("FILE=URL", volumes.VolumeFile.parse, [file]))
    with progress(f"add {entry.path} to volume {name}"):
        path, made = volumes.add_file(name, entry, base=base, resolved=say_resolved)
    if as_json:
        keys = {"offset": made.offset, "size_bytes": made.size_bytes}
        click.echo(json.dumps({"name": name, "path": str(path), **keys}))
        return
    click.echo(path)
    click.echo(f"{format_size(made.size_bytes)} from {entry.origin}", err=True)


@click.command("remove-file")
@volume_name
@click.argument("file")
@click.option("--yes", is_flag=True, help="Do not ask.")
@volumes_base
@json_option
def remove_file(
    name: str, file: str, yes: bool, base: Path | None, as_json: bool
) -> None:
    """Remove a file from a volume and its definition.

    FILE is the path of one that `volume up` or `volume add-file` has made in the volume
    NAME, which is up. What was written to it is lost; other files, copies of it too,
    stay. Its content stays mapped, and in the cache until that needs the room. Asks
    before, without --yes.
    """
    if not yes:
        confirm(f"Remove {file} of volume {name}, with all that was written to it?")
    volumes.remove_file(name, file, base=base)
    if as_json:
        click.echo(json.dumps({"name": name, "file": file, "result": "removed"}))
