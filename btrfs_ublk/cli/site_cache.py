"""``btrfs-ublk site-cache``"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.base.entry import NounGroup, PathType, SizeType
from btrfs_ublk.content.digests import parse_unit
from btrfs_ublk.errors import UsageError


@click.group("site-cache", cls=NounGroup, aliases={})
def command() -> None:
    """Put caches in front of registries and stores.

    nginx is the cache. Volumes, images and maps name it with `--via`, or
    /etc/btrfs-ublk/hosts.toml does for all of a host.
    """


@command.command()
@click.option(
    "--nodes",
    required=True,
    multiple=True,
    metavar="NODE",
    help="A node of the ring: HOST, or HOST:PORT:PORT, the ports being for hosts (3128)"
    " and for other nodes (3130). May be repeated, or a list with commas.",
)
@click.option(
    "--origin",
    "origins",
    required=True,
    multiple=True,
    metavar="URL",
    help="Whom it is in front of, https://HOST. May be repeated.",
)
@click.option(
    "--unit",
    "slice_bytes",
    default="256K",
    type=SizeType(parse_unit),
    help="The unit of the sources, which slices shall have: a power of two from 4K to"
    " 1M.",
)
@click.option(
    *("--max-size", "max_bytes"),
    default="50G",
    type=SizeType(),
    help="What a node stores at most.",
)
@click.option(
    "--directory",
    type=PathType(),
    metavar="DIRECTORY",
    default="/var/cache/btrfs-ublk-site",
    help="Where it stores that, and, beside it, in DIRECTORY.callers. nginx makes both,"
    " if its user gets to what is above.",
)
@click.option(
    "--certificate",
    type=PathType(),
    help="Its certificate (PEM): hosts then ask it by https.  [none: http]",
)
@click.option("--key", type=PathType(), help="The key of the certificate (PEM).")
@click.option(
    "--origin-ca",
    type=PathType(),
    default="/etc/ssl/certs/ca-certificates.crt",
    help="Certificates (PEM) to trust for the origins.",
)
@click.option(
    "--resolver",
    "resolvers",
    multiple=True,
    metavar="ADDRESS",
    help="A name server, for what origins redirect to.  [those of this machine]",
)
@click.option(
    "--this",
    metavar="NODE",
    help="The node that the file is for, where nodes have several ports.",
)
@click.option(
    "--public",
    is_flag=True,
    help="Ask no origin whether a caller may read: all who reach the cache may.",
)
@click.option(
    "-o", "--output", type=PathType(), help="Where to write it.  [standard output]"
)
def config(
    nodes: tuple[str, ...], this: str | None, output: Path | None, **given: Any
) -> None:
    """Write the configuration of nginx for a ring of caches.

    It is the same on each node, and belongs into /etc/nginx/conf.d. Requests are cut
    into slices, which are spread over the nodes; each is fetched once for all hosts.
    Whether a caller may read is asked of the origin, once in 60 s per token and object.

    For example: btrfs-ublk site-cache config --nodes 10.0.0.1,10.0.0.2 --origin
    https://registry.example.org -o /etc/nginx/conf.d/btrfs-ublk.conf
    """
    from btrfs_ublk.kernel.new_file import write_new
    from btrfs_ublk.ops.site_cache.config import Node, SiteCache

    texts = [text for each in nodes for text in each.split(",")]
    text = SiteCache(
        nodes=[Node.parse(text, "--nodes") for text in texts],
        this=None if this is None else Node.parse(this, "--this"),
        **given,
    ).text()
    if output is None:
        click.echo(text, nl=False)
        return
    if os.path.lexists(output) and not stat.S_ISREG(os.lstat(output).st_mode):
        raise UsageError(
            f"{output} is no regular file, and would be replaced by one",
            hint="name the file itself; without -o, the text is printed",
        )
    try:
        write_new(output, text.encode(), replace=True)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error
