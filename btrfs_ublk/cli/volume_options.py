"""What the commands of volumes and those of images have in common; not a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import (
    CountType,
    PathType,
    SecondsType,
    completing,
    json_option,
    stacked,
)
from btrfs_ublk.base.private_dirs import VOLUMES_DIRECTORY, VOLUMES_VARIABLE
from btrfs_ublk.base.progress import progress
from btrfs_ublk.errors import BtrfsUblkError, UsageError

Function = TypeVar("Function", bound=Callable[..., Any])

volumes_base = click.option(
    "--base",
    type=PathType(),
    help=f"Where volumes are kept.  [{VOLUMES_VARIABLE}, else {VOLUMES_DIRECTORY}]",
)
volume_name = click.argument(
    "name",
    shell_complete=completing(lambda: (x.name for x in volumes.volume_directories())),
)


def on_volume(*parameters: Callable[[Any], Any]) -> Callable[[Any], click.Command]:
    """Make a command of a volume, whose function gets ``name``, ``base`` and
    ``as_json``, and what the ``parameters`` add."""
    return stacked(click.command(), volume_name, *parameters, volumes_base, json_option)


def removing(
    what: str, question: str
) -> Callable[[Callable[[str, str, Path | None], object]], click.Command]:
    """Make a command of a function that removes the thing ``what`` of a volume. The
    ``question`` has places for both."""

    def decorate(remove: Callable[[str, str, Path | None], object]) -> click.Command:
        @on_volume(
            click.argument(what),
            click.option("--yes", is_flag=True, help="Do not ask."),
        )
        @wraps(remove)
        def command(
            name: str, yes: bool, base: Path | None, as_json: bool, **keys: str
        ) -> None:
            (thing,) = keys.values()
            if not yes:
                confirm(question.format(thing, name))
            remove(name, thing, base)
            if as_json:
                click.echo(json.dumps({"name": name, **keys, "result": "removed"}))

        return command

    return decorate


#: How the servers of sources are asked.
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
    def command(*args: Any, **keys: Any) -> Any:
        given = {x.name: keys.pop(x.name) for x in fields(volumes.Access)}
        return function(*args, access=volumes.Access(**given), **keys)

    return cast(Function, _source_options(command))


def setting_option(key: str) -> Callable[[Function], Function]:
    """The option of a setting of volumes, None where it is not given."""
    setting = volumes.SETTINGS[key]
    kind, name = setting.kind, setting.option
    if kind.type is bool:
        both = f"{name}/--no-{name.removeprefix('--')}"
        return click.option(both, default=None, help=setting.help)
    if kind.repeats:
        return click.option(
            name,
            multiple=True,
            callback=lambda _ctx, _param, values: values or None,
            metavar=kind.metavar,
            help=f"{setting.help}  [{setting.default_text}]",
        )
    types: dict[Any, Any] = {Path: PathType(), int: CountType(0), float: SecondsType(0)}
    type_ = types.get(kind.type, kind.type)
    return click.option(
        name,
        type=click.Choice(kind.choices) if kind.choices else type_,
        metavar=kind.metavar,
        help=f"{setting.help}  [{setting.default_text}]",
    )


def take_down(name: str, base: Path | None, *, as_json: bool) -> None:
    """Take a volume down, and print what has become of it."""
    with progress(f"take volume {name} down"):
        was_up = volumes.down_volume(name, base=base)
    if as_json:
        result = "down" if was_up else "was down"
        click.echo(json.dumps({"name": name, "result": result}))
    elif not was_up:
        click.echo(f"volume {name} was down", err=True)


def confirm(question: str) -> None:
    """Ask, and go on only after yes. Raises BtrfsUblkError, UsageError."""
    try:
        if not click.confirm(question, err=True):
            raise BtrfsUblkError("nothing was removed")
    except click.Abort as error:
        if isinstance(error.__context__, EOFError):
            click.echo(err=True)  # ends the line of the question
            raise UsageError("nobody answers", hint="use --yes") from error
        raise
