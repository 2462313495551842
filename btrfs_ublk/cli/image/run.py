"""The commands of ``btrfs-ublk image`` that bring an image up, and take it down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from btrfs_ublk import image as images
from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import json_option
from btrfs_ublk.base.log import log
from btrfs_ublk.base.progress import progress
from btrfs_ublk.base.signals import too_late
from btrfs_ublk.cli.image.options import tell, via_options, with_access
from btrfs_ublk.cli.volume_options import (
    setting_option,
    take_down,
    volume_name,
    volumes_base,
)
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_settings(function: _Function) -> _Function:
    """Add the options of an image that is brought up; the command gets those that were
    given as ``settings``, by the keys of definitions."""

    @wraps(function)
    def command(
        *args: Any,
        mount: Path | None,
        writable: str | None,
        deadline: float | None,
        access: images.RegistryAccess,
        **keys: Any,
    ) -> Any:
        settings: dict[str, Any] = {
            "image_docker_config": access.docker_config,
            "image_ca_file": access.ca_file,
            "image_insecure": access.insecure or None,
            "via": access.via,
            "via_plain": access.via_plain or None,
            "mount": mount,
            "writable": writable,
            "deadline": deadline,
        }
        given = {key: value for key, value in settings.items() if value is not None}
        return function(*args, settings=given, **keys)

    made: Any = via_options(with_access(command))
    for key in ("deadline", "writable", "mount"):
        made = setting_option(key)(made)
    return cast(_Function, made)


def bring_up(
    image: str,
    name: str,
    given: dict[str, Any],
    *,
    base: Path | None,
    made: Callable[[], object] | None = None,
) -> volumes.KeptVolume:
    """Have an image up as the volume ``name``, with settings of with_settings()."""
    found = volumes.find_definition(name, base=base)
    settings = {
        volumes.SETTINGS[key].name: volumes.SETTINGS[key].parse(value)
        for key, value in {"image": image, **given}.items()
    }
    changed = {
        key: value
        for key, value in settings.items()
        if value != getattr(found.definition, key)
    }
    if found.file is not None and changed:
        raise UsageError(
            f"volume {name!r} is defined in {found.file}", hint="write it there"
        )
    definition = replace(found.definition, **changed)
    with progress(f"bring image {image} up"):
        return volumes.up_volume(name, definition, base=base, made=made)


@click.command()
@click.argument("image")
@click.argument("words", nargs=-1, metavar="[CMD ARGS]...", type=click.UNPROCESSED)
@click.option("--fork", help="Run it in this fork, which is kept.  [a new one]")
@click.option(
    "--name",
    help="The volume that the image is, or will be.  [one that is of it, else a new"
    " one, named after it]",
)
@with_settings
@volumes_base
def run(
    image: str,
    words: tuple[str, ...],
    fork: str | None,
    name: str | None,
    settings: dict[str, Any],
    base: Path | None,
) -> int:
    """Run a command in a fork of an image.

    For trying an image; it is no sandbox: what runs has the network, the processes and
    the users of this machine, and root in it is root. Containers are containerd's, or
    podman's.

    IMAGE is as for `image up`, which is done before if it is not up; write -- before
    CMD ARGS. Without any, it is the command of the image, whose variables, directory
    and user it has in any case; /proc, /sys, a small /dev and /etc/resolv.conf are
    there. Signals and the terminal are passed on. What it leaves running is killed. The
    fork, unless it has a name, is removed then, and the image taken down, if this
    command has brought it up and nobody else uses it. The volume stays, with what was
    fetched: the next time is faster.

    Exit status: that of CMD, 128 + N after signal N; 127: the image has no such
    program; 126: it cannot be executed.
    """
    is_up = False
    if name is None:
        full_name = str(images.parse_name(image))
        name, is_up = volumes.find_volume_of(full_name, base)
    else:
        is_up = any(x.name == name and x.is_up for x in volumes.list_volumes(base=base))
    bring_up(image, name, settings, base=base)
    try:
        return volumes.run_in_image(name, words, fork=fork, base=base)
    finally:
        if not is_up:
            try:
                volumes.down_volume(name, base=base)
            except LeftoverError as error:
                log.warning("%s", error)


@click.command()
@click.argument("image")
@click.argument("name")
@click.option("--fork", help="Make a fork, unless it is there, and print where it is.")
@with_settings
@volumes_base
@json_option
def up(
    image: str,
    name: str,
    fork: str | None,
    settings: dict[str, Any],
    base: Path | None,
    as_json: bool,
) -> None:
    """Mount an image as a volume, and print where it is.

    IMAGE is oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG or @DIGEST, whose metadata
    are pulled if that was not done; when the tag has moved since, `image pull` before.
    The volume NAME has a read-only subvolume for each layer below `layers`. `volume up
    NAME --image IMAGE` does the same, and has more options.
    """
    made = too_late if fork is None else None
    volume = bring_up(image, name, settings, base=base, made=made)
    keys, shown = volume.to_dict(), volume.mount
    if fork is not None:
        shown = volumes.ensure_fork(name, fork, base=base)
        keys["fork"] = str(shown)
    tell(shown, as_json, keys)


@click.command()
@volume_name
@volumes_base
@json_option
def down(name: str, base: Path | None, as_json: bool) -> None:
    """Unmount an image, and keep its forks.

    The same as `volume down NAME`; `volume remove NAME` removes it with its forks.
    """
    try:
        take_down(name, base, as_json=as_json)
    except BtrfsUblkError as error:
        if error.hint is not None:
            error.hint = error.hint.replace("volume down", "image down")
        raise
