"""The commands of ``btrfs-ublk image`` that read images whole, without a mount."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.entry import PathType, json_option
from btrfs_ublk.base.progress import progress
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.text import visible
from btrfs_ublk.cli.image.options import directory_option, with_access
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import exact_size, format_size


@click.command()
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


@click.command()
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
            task=task,
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


@click.command()
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
                task=task,
            )
    if report.remark:
        click.echo(f"btrfs-ublk: {report.remark}", err=True)


@click.command()
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
            task=task,
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
