"""``btrfs-ublk podman``"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

from btrfs_ublk.base.entry import (
    NounGroup,
    PathType,
    json_option,
    print_rows,
)
from btrfs_ublk.base.progress import progress
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.text import visible
from btrfs_ublk.cli.volume_options import volume_name, volumes_base

_STORE = "/var/lib/btrfs-ublk/podman"

_store = click.option(
    "--store",
    type=PathType(),
    default=_STORE,
    help="The directory that storage.conf names.",
)


@click.group("podman", cls=NounGroup, aliases={"ls": "list", "rm": "remove"})
def command() -> None:
    """Let podman, CRI-O and buildah run images of volumes.

    They see them in an additional image store, read-only, beside their own images;
    nothing is copied, and data arrive when a container reads them.
    """


@command.command()
@_store
@click.option(
    "--file",
    type=PathType(),
    help="The configuration.  [CONTAINERS_STORAGE_CONF, else"
    " /etc/containers/storage.conf]",
)
@click.option("--write", is_flag=True, help="Write the lines, and make the store.")
@click.option("--undo", is_flag=True, help="Remove what --write has written.")
def setup(store: Path, file: Path | None, write: bool, undo: bool) -> None:
    """Print the lines of storage.conf that name the store.

    With --write, they are added to the file, whose other lines stay as they are; where
    it names other stores already, the command says what to write, and changes nothing.
    """
    with deferred():
        from btrfs_ublk.containers.podman import PodmanStore
        from btrfs_ublk.containers.storage_conf import DEFAULT_FILE, StorageConf
        from btrfs_ublk.errors import UsageError
    if write and undo:
        raise UsageError("--write and --undo exclude each other")
    named = os.environ.get("CONTAINERS_STORAGE_CONF")
    store = Path(os.path.abspath(store))
    conf = StorageConf.read(file or (Path(named) if named else DEFAULT_FILE))
    if undo:
        changed = conf.without_ours()
        if changed == conf:
            click.echo(f"{conf.path} has no lines of `podman setup`", err=True)
            return
        changed.write()
        click.echo(f"{conf.path}: {'restored' if changed.path.exists() else 'removed'}")
    elif conf.names(store):
        click.echo(f"{conf.path} names {store} already", err=True)
        if write:
            PodmanStore(store).make()
    elif write:
        changed = conf.with_store(store)
        PodmanStore(store).make()  # podman fails for one that is missing
        is_new = not conf.path.exists()
        changed.write()
        click.echo(f"{conf.path}: {store} added")
        if is_new:
            click.echo(
                "podman now warns users whose images it keeps with another driver, such"
                " as vfs, with each command; with a"
                " ~/.config/containers/storage.conf of theirs, it does not",
                err=True,
            )
    else:
        click.echo(conf.lines(store), nl=False)


@command.command()
@volume_name
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="IMAGE",
    help="What podman calls it; may be repeated.  [as the volume's image]",
)
@_store
@volumes_base
@json_option
def add(
    name: str,
    names: Sequence[str],
    store: Path,
    base: Path | None,
    as_json: bool,
) -> None:
    """Let podman see the image of a volume.

    The volume NAME is up, and was made of an image that has an ordinary one beside it:
    of that, manifest and config are fetched. Running a container needs no registry.
    """
    with deferred():
        from btrfs_ublk.containers.podman import PodmanStore
    with progress(f"look up the image of {name}"):
        added = PodmanStore(store).add(name, names=names, base=base)
    if as_json:
        click.echo(json.dumps(vars(added)))
        return
    for one in added.names:
        click.echo(visible(one))


@command.command()
@volume_name
@_store
def remove(name: str, store: Path) -> None:
    """Let podman see the image of a volume no more.

    Remove the containers of the volume NAME before: without their image, they cannot
    be started.
    """
    with deferred():
        from btrfs_ublk.containers.podman import PodmanStore
    PodmanStore(store).remove(name)


@command.command("list")
@_store
@json_option
def list_command(store: Path, as_json: bool) -> None:
    """List the images of volumes that podman sees."""
    with deferred():
        from btrfs_ublk.containers.podman import PodmanStore
    found = PodmanStore(store).images()
    if as_json:
        click.echo(json.dumps([vars(one) for one in found], indent=2))
        return
    rows = [("VOLUME", "IMAGE", "FILES")]
    for one in found:
        shown = one.tree + ("" if os.path.isdir(one.tree) else " (not up)")
        rows += [(one.volume, visible(name), shown) for name in one.names]
    print_rows(rows)
