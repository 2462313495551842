"""``btrfs-ublk image``"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.entry import NounGroup, PathType, json_option, print_rows
from btrfs_ublk.base.progress import progress
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import exact_size, format_size

_Function = TypeVar("_Function", bound=Callable[..., Any])

_base = click.option(
    "--base",
    type=PathType(),
    help="Where images are kept."
    "  [BTRFS_UBLK_IMAGES_DIR, else /var/lib/btrfs-ublk/images]",
)


def _registry_options(function: _Function) -> _Function:
    for option in reversed(
        [
            click.option(
                "--docker-config",
                type=PathType(),
                help="A config.json with the registry's login, closed to all others."
                "  [Docker's own]",
            ),
            click.option(
                "--ca-file",
                type=PathType(),
                help="Certificates (PEM) to trust for the registry.  [the system's]",
            ),
            click.option(
                "--insecure",
                is_flag=True,
                help="Ask the registry by http; on loopback only.",
            ),
        ]
    ):
        function = option(function)
    return function


@click.group("image", cls=NounGroup, aliases={"ls": "list", "show": "inspect"})
def command() -> None:
    """Have images of file systems whose data arrive when read.

    A sealed image is a btrfs file system whose metadata travel whole and whose data
    stay in a registry, or in a directory, until they are read. The kernel checks each
    block. It is beside the ordinary image that it was made of, under one name.
    """


@command.command()
@click.argument("image")
@_registry_options
@json_option
def inspect(
    image: str,
    docker_config: Path | None,
    ca_file: Path | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Show what is in a sealed image, and what it costs.

    IMAGE is oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG or @DIGEST: of that, only
    the metadata are fetched.
    """
    access = images.RegistryAccess(docker_config, ca_file, insecure)
    with progress(f"look at {image}"):
        report = images.inspect_image(images.parse_name(image), access)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
        return
    header = report.header
    lines = [
        ("image", report.name),
        ("sealed as", report.manifest.digest),
        ("platform", report.platform),
        ("fsid", header.fsid),
        ("pack", format_size(report.manifest.pack.size)),
        ("metadata", format_size(report.metadata_bytes)),
        ("data", format_size(header.data_bytes)),
        ("unit", exact_size(header.unit)),
        *(("layer", layer.chain_id) for layer in header.layers),
    ]
    for name, value in lines:
        click.echo(f"{name:10} {value}")


@command.command()
@click.argument("layout")
@click.argument("image")
@click.option(
    "--mount-from",
    metavar="REPOSITORY",
    help="A repository of the same registry that may have the blobs already.",
)
@_registry_options
@json_option
def push(
    layout: str,
    image: str,
    mount_from: str | None,
    docker_config: Path | None,
    ca_file: Path | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Store an image of a layout in a registry.

    LAYOUT is oci:DIRECTORY[:TAG], IMAGE is REGISTRY/REPOSITORY:TAG. The ordinary image
    and the sealed one get that name, for all clients. Blobs that the registry has are
    not sent again; the tag changes last.
    """
    target = images.parse_reference(image)
    if target.digest is not None:
        raise UsageError(
            f"{image} has a digest, which follows from the content",
            hint="name a tag: REGISTRY/REPOSITORY:TAG",
        )
    name = images.parse_layout(layout)
    opened = images.Layout.opened(name.path)
    one = opened.find(name.tag)
    total = sum(each.size for each, data in images.walk(opened, one) if data is None)
    access = images.RegistryAccess(docker_config, ca_file, insecure)
    with (
        progress(f"push {image}", total=total, in_bytes=True) as task,
        images.Repository(target, access, writing=True) as repository,
    ):
        pushed = images.push_image(
            opened,
            one,
            target,
            repository,
            mount_from=mount_from,
            progress=task.advance,
        )
    if as_json:
        keys = {
            "image": str(target),
            "digest": pushed.digest,
            "uploaded": pushed.uploaded,
            "uploaded_bytes": pushed.uploaded_bytes,
            "mounted": pushed.mounted,
            "there": pushed.there,
        }
        click.echo(json.dumps(keys))
        return
    click.echo(f"{target.place}@{pushed.digest}")
    click.echo(
        f"{pushed.uploaded} blobs sent ({format_size(pushed.uploaded_bytes)}), "
        f"{pushed.mounted} mounted, {pushed.there} were there",
        err=True,
    )


@command.command()
@click.argument("image")
@click.option("--pin", is_flag=True, help="Keep it: `image gc` leaves it.")
@_base
@_registry_options
@json_option
def pull(
    image: str,
    pin: bool,
    base: Path | None,
    docker_config: Path | None,
    ca_file: Path | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Get the metadata of a sealed image.

    IMAGE is REGISTRY/REPOSITORY:TAG, or @DIGEST. Its data stay in the registry until
    they are read. The kernel parses the metadata, so /etc/btrfs-ublk/images.toml says
    from where, or by whom, images may come; without it, only those named by digest.
    """
    reference = images.parse_reference(image)
    access = images.RegistryAccess(docker_config, ca_file, insecure)
    with progress(f"pull {image}"):
        pulled = images.pull_image(
            reference, access, images.ImageStore(base), pinned=pin
        )
    if as_json:
        keys = {
            "image": image,
            "digest": pulled.digest,
            "allowed": pulled.why,
            "fetched_bytes": pulled.fetched_bytes,
        }
        click.echo(json.dumps(keys))
        return
    click.echo(f"{reference.place}@{pulled.digest}")
    click.echo(f"{format_size(pulled.fetched_bytes)} fetched; {pulled.why}", err=True)


@command.command("list")
@_base
@json_option
def list_command(base: Path | None, as_json: bool) -> None:
    """List the images whose metadata are on this machine."""
    found = images.ImageStore(base).images()
    if as_json:
        click.echo(json.dumps([_keys(image) for image in found], indent=2))
        return
    rows = [("IMAGE", "DIGEST", "PINNED", "PACK", "DATA")]
    for image in found:
        for name in image.names or ("-",):
            rows.append(
                (
                    name,
                    image.digest[:19],
                    "yes" if image.pinned else "-",
                    format_size(image.pack_bytes),
                    format_size(image.data_bytes),
                )
            )
    print_rows(rows)


def _keys(image: images.StoredImage) -> dict[str, object]:
    return vars(image) | {"directory": str(image.directory)}


@command.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@_base
@json_option
def gc(dry_run: bool, base: Path | None, as_json: bool) -> None:
    """Remove images that are not pinned.

    Volumes have copied what they need, so those of a removed image go on.
    """
    gone = images.ImageStore(base).collect((), dry_run=dry_run)
    if as_json:
        click.echo(json.dumps([_keys(image) for image in gone], indent=2))
        return
    for image in gone:
        click.echo(f"{'would remove' if dry_run else 'removed'} {image.digest}")
