"""``btrfs-ublk image list``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.entry import CountType, PathType, json_option, print_rows
from btrfs_ublk.base.progress import progress
from btrfs_ublk.cli.image_options import with_access
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


@click.command("list")
@images_base
@click.option(
    "--registry",
    metavar="REPOSITORY",
    help="Instead, the versions in a repository of a registry, as"
    " registry.example.org/team/app.",
)
@click.option(
    "--last",
    type=CountType(1, 1000),
    help="With --registry: only that many versions, in the order of the numbers in"
    " their tags.  [20]",
)
@click.option(
    "--new",
    "with_new",
    is_flag=True,
    help="With --registry: also how much is new in each version, for a host that has"
    " the one before it. Fetches the metadata packs that are not here.",
)
@with_access
@json_option
def list_command(
    base: Path | None,
    registry: str | None,
    last: int | None,
    with_new: bool,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """List images on this machine, or in a repository.

    On this machine, those whose metadata are here. Of a repository, SEALED says whether
    an image is sealed, has an index beside it, or is an ordinary one only, which would
    have to be unpacked.
    """
    if registry is not None:
        _list_versions(registry, access, last or 20, with_new, as_json)
        return
    if last is not None or with_new or access != images.RegistryAccess():
        raise UsageError(
            "the options of a registry are given, and none is named",
            hint="name its repository: --registry registry.example.org/team/app",
        )
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


def _list_versions(
    text: str, access: images.RegistryAccess, last: int, with_new: bool, as_json: bool
) -> None:
    place = images.parse_repository(text, "--registry")
    with progress(f"list {text}") as task:
        found = images.list_versions(
            place,
            access,
            last=last,
            with_new=with_new,
            expect=task.expect,
            progress=task.advance,
        )
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    rows = [("TAG", "DIGEST", "SEALED", "PACK", "DATA", *(["NEW"] * with_new))]
    for one in found.versions:
        sizes = [one.pack_bytes, one.data_bytes, *([one.new_bytes] * with_new)]
        shown = ["-" if size is None else format_size(size) for size in sizes]
        digest = one.digest[:19] if one.digest else "-"
        rows.append((one.tag, digest, one.kind or "?", *shown))
    print_rows(rows)
    for one in found.versions:
        if one.problem:
            click.echo(f"{one.tag}: {one.problem}", err=True)
    if len(found.versions) < found.tags:
        rest = found.tags - len(found.versions)
        click.echo(f"{rest} more, before these: --last {found.tags}", err=True)
