"""The commands of ``btrfs-ublk volume`` that add whole trees."""

from __future__ import annotations

import json
from pathlib import Path

import click

from btrfs_ublk import image as images
from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import json_option
from btrfs_ublk.base.progress import progress
from btrfs_ublk.cli.image_options import platform_option, via_options, with_access
from btrfs_ublk.cli.volume_options import volume_name, volumes_base
from btrfs_ublk.units import format_size


@click.command("add-image")
@volume_name
@click.argument("image")
@click.argument("path", required=False)
@click.option(
    "--layer", metavar="CHAIN-ID", help="Another layer.  [the last: the whole image]"
)
@volumes_base
@with_access
@via_options
@json_option
def add_image(
    name: str,
    image: str,
    path: str | None,
    layer: str | None,
    base: Path | None,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Add the tree of a sealed image to a volume.

    IMAGE is oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG or @DIGEST, built with
    --compression none. Its files are made again in the volume NAME, which is up, in a
    new subvolume PATH; without it, that has the tag of a layout, else the last part of
    the repository's name. They can be written to, as all files of the volume. Their
    data stay where they are until they are read; only small files are written. Many
    images can be in one volume.
    """
    with progress(f"add {image} to volume {name}", total=0) as task:
        added = volumes.add_image(
            name,
            images.parse_name(image),
            path,
            layer=layer,
            access=access,
            base=base,
            task=task,
        )
    _print(added, as_json=as_json)


@click.command("add-tree")
@volume_name
@click.argument("source")
@click.argument("path")
@platform_option
@volumes_base
@with_access
@json_option
def add_tree(
    name: str,
    source: str,
    path: str,
    platform: str | None,
    base: Path | None,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Add a directory, a tar or an ordinary image to a volume.

    SOURCE is a directory, a tar, oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG, as in
    `image build`. It is read once: its data, equal content once, are put into a file in
    the directory of the volume NAME, which is up, and the tree is made of that as by
    `volume add-image`, at PATH. SOURCE is not needed any more then.
    """
    with progress(f"add {source} to volume {name}", total=0) as task:
        added = volumes.add_tree(
            name,
            images.parse_source(source),
            path,
            platform=platform,
            access=access,
            base=base,
            task=task,
        )
    _print(added, as_json=as_json)


def _print(added: volumes.AddedTree, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(added.to_dict()))
        return
    click.echo(added.path)
    click.echo(
        f"{added.entries} entries; {format_size(added.cloned_bytes)} are clones, "
        f"{format_size(added.written_bytes)} were written",
        err=True,
    )
