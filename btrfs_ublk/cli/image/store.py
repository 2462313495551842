"""The commands of ``btrfs-ublk image`` on registries, and on what was pulled."""

from __future__ import annotations

import json
from pathlib import Path

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.entry import PathType, json_option, print_rows
from btrfs_ublk.base.progress import progress
from btrfs_ublk.cli.image.options import (
    mount_from_option,
    tell,
    via_options,
    with_access,
)
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import format_size

images_base = click.option(
    "--base",
    type=PathType(),
    help="Where images are kept."
    "  [BTRFS_UBLK_IMAGES_DIR, else /var/lib/btrfs-ublk/images]",
)


def image_keys(image: images.StoredImage) -> dict[str, object]:
    """Return what is printed of an image as JSON."""
    return vars(image) | {"directory": str(image.directory)}


@click.command()
@click.argument("layout")
@click.argument("image")
@mount_from_option
@with_access
@json_option
def push(
    layout: str,
    image: str,
    mount_from: str | None,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Store an image of a layout in a registry, or in an S3 bucket.

    LAYOUT is oci:DIRECTORY[:TAG], IMAGE is REGISTRY/REPOSITORY:TAG. The ordinary image
    and the sealed one get that name, for all clients. Blobs that the registry has are
    not sent again; the tag changes last. An image of `image index` gets no name: it
    refers to the image that has this one, which must be the image that it indexes.
    s3://BUCKET/PREFIX:TAG puts the image into a layout there; AWS_ENDPOINT_URL and the
    like say where the bucket is, and who asks.
    """
    target = images.parse_reference(image)
    if target.digest is not None:
        raise UsageError(
            f"{image} has a digest, which follows from the content",
            hint=f"name a tag: {target.place}:TAG",
        )
    name = images.parse_layout(layout)
    opened = images.Layout.opened(name.path)
    one = opened.find(name.tag)
    total = sum(each.size for each, data in images.walk(opened, one) if data is None)
    with (
        progress(f"push {image}", total=total, in_bytes=True) as task,
        images.open_repository(target, access, writing=True) as repository,
    ):
        pushed = images.push_image(
            opened,
            one,
            target,
            repository,
            mount_from=mount_from,
            progress=task.advance,
        )
    keys = {"image": str(target), **pushed.to_dict()}
    tell(f"{target.place}@{pushed.digest}", as_json, keys, pushed.summary)


@click.command()
@click.argument("trace", type=PathType(exists=True, dir_okay=False))
@click.argument("image")
@with_access
@json_option
def trace(
    trace: Path, image: str, access: images.RegistryAccess, as_json: bool
) -> None:
    """Store beside a sealed image what a trace of its start has read.

    TRACE is what `trace record` has written while the image was up, IMAGE is
    REGISTRY/REPOSITORY:TAG. Hosts that pull the image afterwards find the trace, which
    refers to it, and fetch first what it names, unless the image was built with a trace
    already. The image stays as it is; the newest trace counts.
    """
    from btrfs_ublk.content.trace import Trace

    target, loaded = images.parse_reference(image), Trace.load(trace)
    with (
        progress(f"push {trace}"),
        images.open_repository(target, access, writing=True) as repository,
    ):
        pushed = images.push_trace(loaded, target, repository)
    left_out = format_size(pushed.left_out_bytes)
    tell(
        f"{target.place}@{pushed.digest}",
        as_json,
        vars(pushed),
        f"{format_size(pushed.traced_bytes)} come first"
        + (f", {left_out} more would be too much" if pushed.left_out_bytes else ""),
    )


@click.command()
@click.argument("image")
@click.option("--pin", is_flag=True, help="Keep it: `image gc` leaves it.")
@images_base
@with_access
@via_options
@json_option
def pull(
    image: str,
    pin: bool,
    base: Path | None,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Get the metadata of a sealed image.

    IMAGE is REGISTRY/REPOSITORY:TAG, or @DIGEST, or the same with the URL of a layout:
    s3://BUCKET/PREFIX, https://HOST/DIRECTORY. Its data stay there until they are read.
    The kernel parses the metadata, so /etc/btrfs-ublk/images.toml says from where, or
    by whom, images may come; without it, only those named by digest. Of an image that
    has no sealed one, an index is taken that refers to it.
    """
    reference = images.parse_reference(image)
    with progress(f"pull {image}"):
        pulled = images.pull_image(
            reference, access, images.ImageStore(base), pinned=pin
        )
    keys = {"image": image, "digest": pulled.digest, "allowed": pulled.why}
    tell(
        f"{reference.place}@{pulled.digest}",
        as_json,
        keys | {"fetched_bytes": pulled.fetched_bytes},
        f"{format_size(pulled.fetched_bytes)} fetched; {pulled.why}",
    )


@click.command()
@click.argument("image")
@images_base
def unpin(image: str, base: Path | None) -> None:
    """Let `image gc` remove an image that was pulled with --pin."""
    images.ImageStore(base).pin(str(images.parse_reference(image)), pinned=False)


@click.command("list")
@images_base
@json_option
def list_command(base: Path | None, as_json: bool) -> None:
    """List images whose metadata are on this machine."""
    found = images.ImageStore(base).images()
    if as_json:
        click.echo(json.dumps([image_keys(image) for image in found], indent=2))
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


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@images_base
@json_option
def gc(dry_run: bool, base: Path | None, as_json: bool) -> None:
    """Remove images that are not pinned (`image pull --pin`, `image unpin`).

    Volumes have copied what they need, so those of a removed image go on.
    """
    gone = images.ImageStore(base).collect((), dry_run=dry_run)
    if as_json:
        click.echo(json.dumps([image_keys(image) for image in gone], indent=2))
        return
    for image in gone:
        click.echo(f"{'would remove' if dry_run else 'removed'} {image.digest}")
