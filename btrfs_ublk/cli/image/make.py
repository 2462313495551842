"""The commands of ``btrfs-ublk image`` that make images."""

from __future__ import annotations

from pathlib import Path

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.entry import PathType, json_option
from btrfs_ublk.base.progress import progress
from btrfs_ublk.cli.image.options import (
    First,
    check_option,
    layout_options,
    max_inline_option,
    mount_from_option,
    platform_option,
    tell,
    unit_option,
    with_access,
    with_build_options,
    with_first,
)
from btrfs_ublk.units import format_size


@click.command()
@click.argument("source")
@layout_options
@platform_option
@with_build_options
@check_option
@with_access
@json_option
def build(
    source: str,
    output: Path,
    tag: str | None,
    platform: str | None,
    options: images.BuildOptions,
    first: First,
    check: bool,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Make a sealed image, in an OCI image layout.

    SOURCE is a directory, a tar, oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG. Of an
    image, each layer becomes a read-only subvolume. The layout has the ordinary image
    as well, so that `image push` makes one name for all clients.
    """
    origin = images.parse_source(source)
    with progress(f"make an image of {source}") as task:
        if first:
            task.say("see what comes first")
            options = with_first(
                options, first, origin, access, layout=output, platform=platform
            )

        def check_layers(name: images.LayoutName) -> None:
            if check:
                task.say("check the layers")
                images.check_layers(name, origin, access, platform=platform)

        made = images.build_image(
            origin,
            output.absolute(),
            options,
            tag=tag,
            platform=platform,
            access=access,
            check=check_layers,
            say=task.say,
        )
    note = (
        f"{format_size(made.metadata_bytes)} of metadata, packed in "
        f"{format_size(made.pack_bytes)}; {format_size(made.data_bytes)} of data"
        + (f", {format_size(made.first_bytes)} first" if made.first_bytes else "")
    )
    tell(made.name, as_json, made.to_dict(), note)


@click.command()
@click.argument("source")
@layout_options
@platform_option
@max_inline_option
@unit_option
@with_access
@json_option
def index(
    source: str,
    output: Path,
    tag: str | None,
    platform: str | None,
    max_inline: int | None,
    unit: int,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Index an image that stays as it is, in an OCI image layout.

    SOURCE is REGISTRY/REPOSITORY:TAG, or oci:DIRECTORY[:TAG]: an ordinary image whose
    layers are compressed by gzip, or by zstd in frames of 16 MiB at most. They are
    read once, and stay where they are; what is made has the metadata, and where in the
    layers the data are. `image push` stores it beside the image, which keeps its name.
    To be brought up without a registry, it must be in the layout that has the image, by
    another name: `image index oci:DIR:1 --output DIR --tag 1-index`.
    """
    origin = images.parse_name(source)
    options = images.BuildOptions(max_inline=max_inline, unit_bytes=unit)
    with progress(f"index {source}") as task:
        made = images.index_image(
            origin,
            output.absolute(),
            options,
            tag=tag,
            platform=platform,
            access=access,
            say=task.say,
        )
    note = (
        f"{format_size(made.metadata_bytes)} of metadata, and "
        f"{format_size(made.index_bytes)} for {format_size(made.layer_bytes)} of "
        f"layers, packed in {format_size(made.pack_bytes)}"
    )
    tell(made.name, as_json, made.to_dict(), note)


@click.command()
@click.argument("image")
@click.argument("new")
@platform_option
@with_build_options
@check_option
@mount_from_option
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
    first: First,
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
        if first:
            task.say("see what comes first")
            options = with_first(options, first, source, access, platform=platform)
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
    keys = {"image": str(target), "source": str(made.source), "sealed": made.sealed}
    tell(
        f"{target.place}@{made.digest}",
        as_json,
        keys | made.pushed.to_dict(),
        f"{made.source}: {made.pushed.summary}",
    )
