"""``btrfs-ublk image warm``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.entry import PathType, json_option
from btrfs_ublk.base.progress import progress
from btrfs_ublk.cli.image_options import with_access
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import format_size


@click.command()
@click.argument("image")
@click.option(
    *("--site", "via"),
    multiple=True,
    metavar="URL",
    help="A cache of the site, http://HOST:PORT; may be repeated: name all that its"
    " hosts name.  [those of hosts.toml]",
)
@click.option(
    "--via-plain",
    is_flag=True,
    help="Tokens may go to those caches without TLS.",
)
@click.option(
    "--trace",
    type=PathType(exists=True, dir_okay=False),
    help="Of the data, only what this trace has read (`trace record`), in its order.",
)
@click.option(
    "--first",
    is_flag=True,
    help="Of the data, only what comes first in the image (`image build --trace`).",
)
@with_access
@json_option
def warm(
    image: str,
    trace: Path | None,
    first: bool,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Fill the caches of a site with an image.

    IMAGE is REGISTRY/REPOSITORY:TAG, or @DIGEST. Its metadata and data are asked for
    as hosts ask, compared with their digests, and not kept here. After that, the hosts
    of the site cost the registry nothing. Run it once for each site, on any machine
    there. What the caches have already is not fetched again.
    """
    if trace is not None and first:
        raise UsageError("--trace and --first exclude each other")
    reference = images.parse_reference(image)
    with progress(f"warm {image}", in_bytes=True) as task:
        found = None
        if trace is not None:
            from btrfs_ublk.content.trace import Trace

            found = Trace.load(trace)
        report = images.warm_image(
            reference,
            access,
            trace=found,
            first=first,
            expect=task.expect,
            progress=task.advance,
            say=task.say,
        )
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    there = "the caches do not say how much was there"
    if report.hit_bytes is not None:
        there = f"{format_size(report.hit_bytes)} of it were there"
    click.echo(f"{reference.place}@{report.digest}")
    click.echo(f"{format_size(report.asked_bytes)} asked for, {there}", err=True)
