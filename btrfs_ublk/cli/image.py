"""``btrfs-ublk image``"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from btrfs_ublk import image as images
from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import NounGroup, PathType, json_option, print_rows
from btrfs_ublk.base.progress import progress
from btrfs_ublk.base.signals import deferred, too_late
from btrfs_ublk.base.text import visible
from btrfs_ublk.cli.image_options import (
    First,
    directory_option,
    layout_options,
    max_inline_option,
    platform_option,
    unit_option,
    via_options,
    with_access,
    with_build_options,
    with_first,
)
from btrfs_ublk.cli.image_run import bring_up, with_settings
from btrfs_ublk.cli.volume_options import take_down, volume_name, volumes_base
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import exact_size, format_size

images_base = click.option(
    "--base",
    type=PathType(),
    help="Where images are kept."
    "  [BTRFS_UBLK_IMAGES_DIR, else /var/lib/btrfs-ublk/images]",
)


def image_keys(image: images.StoredImage) -> dict[str, object]:
    """Return what is printed of an image as JSON."""
    return vars(image) | {"directory": str(image.directory)}


@click.group(
    "image",
    cls=NounGroup,
    aliases={"ls": "list", "show": "inspect"},
    elsewhere={
        "btrfs_ublk.cli.image_run": ("run",),
        "btrfs_ublk.cli.image_forks": (
            *("fork", "forks", "changes", "unfork", "commit", "apply", "detach"),
        ),
    },
)
def command() -> None:
    """Have images of file systems whose data arrive when read.

    A sealed image is a btrfs file system whose metadata travel whole and whose data
    stay in a registry, or in a directory, until they are read. The kernel checks each
    block. It is beside the ordinary image that it was made of, under one name.
    """


@command.command()
@click.argument("source")
@layout_options
@platform_option
@with_build_options
@click.option(
    "--check",
    is_flag=True,
    help="Read all layers back, and compare them with what the source makes anew.",
)
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
    if as_json:
        click.echo(json.dumps(made.to_dict()))
        return
    click.echo(made.name)
    click.echo(
        f"{format_size(made.metadata_bytes)} of metadata, packed in "
        f"{format_size(made.pack_bytes)}; {format_size(made.data_bytes)} of data"
        + (f", {format_size(made.first_bytes)} first" if first else ""),
        err=True,
    )


@command.command()
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
    if as_json:
        click.echo(json.dumps(made.to_dict()))
        return
    click.echo(made.name)
    click.echo(
        f"{format_size(made.metadata_bytes)} of metadata, and "
        f"{format_size(made.index_bytes)} for {format_size(made.layer_bytes)} of "
        f"layers, packed in {format_size(made.pack_bytes)}",
        err=True,
    )


@command.command()
@click.argument("image")
@with_access
@json_option
def inspect(image: str, access: images.RegistryAccess, as_json: bool) -> None:
    """Show what is in a sealed image, and what it costs.

    IMAGE is oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG or @DIGEST: of that, only
    the metadata are fetched.
    """
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
        ("first", format_size(header.first_bytes)),
        ("unit", exact_size(header.unit)),
        *(("layer", layer.chain_id) for layer in header.layers),
        *(("data in", each.layer) for each in header.sources),
    ]
    for name, value in lines:
        click.echo(f"{name:10} {visible(value)}")


@command.command()
@click.argument("image")
@directory_option
@click.option(
    "--no-btrfs-check",
    is_flag=True,
    help="Leave `btrfs check` out, and compare digests only.",
)
@with_access
@json_option
def check(
    image: str,
    directory: Path | None,
    no_btrfs_check: bool,
    access: images.RegistryAccess,
    as_json: bool,
) -> int:
    """Verify all of a sealed image, offline.

    That is its manifest, the metadata pack, and each unit of its data, by their
    digests. Then metadata and data are put together in a temporary file, and `btrfs
    check` compares structures and the kernel's checksums of all data. Mounts nothing,
    and needs no privileges.

    IMAGE is oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG or @DIGEST: of that, all
    data are fetched. Exit status 1: something is wrong.
    """
    with progress(f"check {image}", in_bytes=True) as task:
        report = images.check_image(
            images.parse_name(image),
            access,
            directory=directory,
            with_btrfs_check=not no_btrfs_check,
            expect=task.expect,
            progress=task.advance,
            say=task.say,
        )
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        _print_check(report)
    return 0 if report.clean else 1


def _print_check(report: images.CheckReport) -> None:
    for problem in report.problems:
        click.echo(visible(problem))
    count = report.problem_count
    if count > len(report.problems):
        click.echo(f"and {count - len(report.problems)} more")
    result = f"{count} problem{'s' * (count > 1)}" if count else "clean"
    click.echo(
        f"{visible(report.name)}: {result}; {report.right_units} of {report.units} "
        f"units right, {format_size(report.right_bytes)} of "
        f"{format_size(report.data_bytes)} of data; "
        f"{format_size(report.metadata_bytes)} of metadata"
    )
    click.echo(f"btrfs check: {report.btrfs_check}")


@command.command()
@click.argument("image")
@click.option("-o", "--output", type=PathType(), help="The tar.  [stdout]")
@click.option(
    "--layer", metavar="CHAIN-ID", help="Another layer.  [the last: the whole image]"
)
@directory_option
@with_access
def export(
    image: str,
    output: Path | None,
    layer: str | None,
    directory: Path | None,
    access: images.RegistryAccess,
) -> None:
    """Write a sealed image as a tar.

    It has all that the source had: names, types, owners, times, attributes, hard links
    and holes; no sockets, as no tar has. Equal trees make equal tars. All of the image
    is compared with its digests before. Mounts nothing, and needs no privileges.

    IMAGE is oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG or @DIGEST: of that, all
    data are fetched.
    """
    with deferred():
        from btrfs_ublk.kernel.new_file import new_file
    if output is None and sys.stdout.isatty():
        raise UsageError(
            "a tar is nothing for a terminal", hint="name a file with --output"
        )
    with (
        nullcontext(sys.stdout.buffer)
        if output is None
        else new_file(output, replace=True)
    ) as out:
        with progress(f"export {image}", in_bytes=True) as task:
            report = images.export_image(
                images.parse_name(image),
                access,
                out,
                layer=layer,
                directory=directory,
                expect=task.expect,
                progress=task.advance,
                say=task.say,
            )
    if report.remark:
        click.echo(f"btrfs-ublk: {report.remark}", err=True)


@command.command()
@click.argument("first")
@click.argument("second")
@directory_option
@with_access
@json_option
def diff(
    first: str,
    second: str,
    directory: Path | None,
    access: images.RegistryAccess,
    as_json: bool,
) -> int:
    """Show in which files two images differ.

    FIRST and SECOND are images, as in `image export`, or a directory or a tar, as in
    `image build`. Each line has a path that was added or removed, or what has changed
    of it: type, mode, owner, time, size, target, attributes, content, or the name that
    it is a hard link to. Of two images, stderr says how much of the data of SECOND is
    not in FIRST. Mounts nothing, and needs no privileges.

    Exit status 1: they differ, or cannot be compared.
    """
    found: list[images.Difference] = []
    with progress(f"compare {first} and {second}", in_bytes=True) as task:
        report = images.diff_images(
            images.parse_source(first),
            images.parse_source(second),
            access,
            found.append,
            directory=directory,
            expect=task.expect,
            progress=task.advance,
            say=task.say,
        )
    if as_json:
        keys = vars(report) | {"differences": [one.to_dict() for one in found]}
        click.echo(json.dumps(keys))
        return 1 if report.differences else 0
    for difference in found:
        click.echo(visible(str(difference)).replace("\n", r"\n"))
    if report.new_bytes is not None and report.data_bytes is not None:
        click.echo(
            f"{format_size(report.new_bytes)} of {format_size(report.data_bytes)} of "
            "data are new",
            err=True,
        )
    return 1 if report.differences else 0


@command.command()
@click.argument("layout")
@click.argument("image")
@click.option(
    "--mount-from",
    metavar="REPOSITORY",
    help="A repository of the same registry that may have the blobs already.",
)
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
    refers to the image that has this one, which must be that of which it is an index.
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
    if as_json:
        click.echo(json.dumps({"image": str(target), **pushed.to_dict()}))
        return
    click.echo(f"{target.place}@{pushed.digest}")
    click.echo(pushed.summary, err=True)


@command.command()
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


@command.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@images_base
@json_option
def gc(dry_run: bool, base: Path | None, as_json: bool) -> None:
    """Remove images that are not pinned (`image pull --pin`).

    Volumes have copied what they need, so those of a removed image go on.
    """
    gone = images.ImageStore(base).collect((), dry_run=dry_run)
    if as_json:
        click.echo(json.dumps([image_keys(image) for image in gone], indent=2))
        return
    for image in gone:
        click.echo(f"{'would remove' if dry_run else 'removed'} {image.digest}")


@command.command()
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
    are pulled if that was not done. The volume NAME has a read-only subvolume for each
    layer below `layers`. `volume up NAME --image IMAGE` does the same, and has more
    options.
    """
    made = too_late if fork is None else None
    volume = bring_up(image, name, settings, base=base, made=made)
    keys, shown = volume.to_dict(), volume.mount
    if fork is not None:
        shown = volumes.ensure_fork(name, fork, base=base)
        keys["fork"] = str(shown)
    click.echo(json.dumps(keys) if as_json else shown)


@command.command()
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


@command.command("list")
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


@command.command()
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
