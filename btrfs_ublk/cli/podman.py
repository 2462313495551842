"""``btrfs-ublk podman``"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from btrfs_ublk.base.entry import NounGroup, PathType, json_option, print_found
from btrfs_ublk.base.progress import progress
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.text import table, visible
from btrfs_ublk.cli.volume_options import volume_name, volumes_base

if TYPE_CHECKING:
    from btrfs_ublk.containers.podman import PodmanStore

_STORE = "/var/lib/btrfs-ublk/podman"
#: With podman's defaults, which a file has to say.
_STORAGE_CONF = """\
[storage]
driver = "overlay"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
[storage.options]
additionalimagestores = """

_store = click.option(
    "--store",
    type=PathType(),
    default=_STORE,
    help="The directory that storage.conf names.",
)


def _at(store: Path) -> PodmanStore:
    with deferred():
        from btrfs_ublk.containers.podman import PodmanStore
    return PodmanStore(store)


@click.group("podman", cls=NounGroup, aliases={"ls": "list", "rm": "remove"})
def command() -> None:
    """Let podman, CRI-O and buildah run images of volumes.

    They see them in an additional image store, read-only, beside their own images;
    nothing is copied, and data arrive when a container reads them.
    """


@command.command()
@_store
def setup(store: Path) -> None:
    """Make the store, and print a storage.conf that names it.

    Where there is no /etc/containers/storage.conf, that is all of it; else, the last
    line belongs below its [storage.options].
    """
    store = Path(os.path.abspath(store))
    _at(store).make()  # podman fails for one that is missing
    click.echo(_STORAGE_CONF + json.dumps([str(store)]))


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
    name: str, names: Sequence[str], store: Path, base: Path | None, as_json: bool
) -> None:
    """Let podman see the image of a volume.

    The volume NAME is up, and was made of an image that has an ordinary one beside it:
    of that, manifest and config are fetched. Running a container needs no registry.
    """
    with progress(f"look up the image of {name}"):
        added = _at(store).add(name, names=names, base=base)
    print_found(vars(added), map(visible, added.names), as_json=as_json)


@command.command()
@volume_name
@_store
def remove(name: str, store: Path) -> None:
    """Let podman see the image of a volume no more.

    Remove the containers of the volume NAME before: without their image, they cannot
    be started.
    """
    _at(store).remove(name)


@command.command("list")
@_store
@json_option
def list_command(store: Path, as_json: bool) -> None:
    """List the images of volumes that podman sees."""
    found = _at(store).images()
    rows = [("VOLUME", "IMAGE", "FILES")]
    for one in found:
        shown = one.tree + ("" if os.path.isdir(one.tree) else " (not up)")
        rows += [(one.volume, visible(name), shown) for name in one.names]
    told = [vars(one) for one in found]
    print_found(told, [table(rows)], as_json=as_json)
