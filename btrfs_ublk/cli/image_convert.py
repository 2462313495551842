"""``btrfs-ublk image convert``"""

from __future__ import annotations

import json
from pathlib import Path

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.entry import PathType, json_option
from btrfs_ublk.base.progress import progress
from btrfs_ublk.cli.image_options import (
    platform_option,
    with_access,
    with_build_options,
    with_first,
)


@click.command()
@click.argument("image")
@click.argument("new")
@platform_option
@with_build_options
@click.option(
    "--check",
    is_flag=True,
    help="Read all layers back, and compare them with the image's, before the push.",
)
@click.option(
    "--mount-from",
    metavar="REPOSITORY",
    help="A repository of the new image's registry that may have the blobs already."
    "  [that of IMAGE]",
)
@click.option(
    "--work",
    type=PathType(),
    help="A directory for what is not stored yet, as large as both images."
    "  [/var/tmp]",
)
@with_access
@json_option
def convert(
    image: str,
    new: str,
    platform: str | None,
    options: images.BuildOptions,
    trace: Path | None,
    traced: str | None,
    check: bool,
    mount_from: str | None,
    work: Path | None,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Make a sealed image of one in a registry, and store both.

    `image build` and `image push` in one command, for CI systems. IMAGE and NEW are
    REGISTRY/REPOSITORY:TAG, and may be the same; IMAGE may have a digest. NEW becomes
    an index of the ordinary image, with its layers as they are, and the sealed one.
    The same image and options make the same digests.

    A command that was stopped or killed is gone on with by the next one: what has been
    fetched, made or sent is not again.
    """
    source, target = images.parse_reference(image), images.parse_reference(new)
    with progress(f"convert {image}", in_bytes=True) as task:
        if trace is not None:
            task.say("see what comes first")
            options = with_first(options, trace, traced, None, access)
        made = images.convert_image(
            source,
            target,
            options,
            access,
            work=work,
            platform=platform,
            check=check,
            mount_from=mount_from,
            expect=task.expect,
            progress=task.advance,
            say=task.say,
        )
    if as_json:
        keys = {
            "image": str(target),
            "source": str(made.source),
            "sealed": made.sealed,
            **made.pushed.to_dict(),
        }
        click.echo(json.dumps(keys))
        return
    click.echo(f"{target.place}@{made.digest}")
    click.echo(f"{made.source}: {made.pushed.summary}", err=True)
