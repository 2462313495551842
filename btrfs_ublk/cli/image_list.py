"""``btrfs-ublk image list``"""

from __future__ import annotations

import json
from pathlib import Path

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.entry import PathType, json_option, print_rows
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
