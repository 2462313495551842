"""What the commands of volumes and those of images have in common; not a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import CountType, PathType, SecondsType, completing
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
    types: dict[Any, Any] = {
        Path: PathType(),
        int: CountType(0),
        float: SecondsType(0),
    }
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
            raise UsageError("nobody answers", hint="use --yes") from error
        raise
