"""``btrfs-ublk image``"""

from __future__ import annotations

import click

from btrfs_ublk.base.entry import NounGroup


@click.group(
    "image",
    cls=NounGroup,
    aliases={"ls": "list", "show": "inspect"},
    elsewhere={
        "btrfs_ublk.cli.image.make": ("build", "index", "convert"),
        "btrfs_ublk.cli.image.look": ("inspect", "check", "export", "diff"),
        "btrfs_ublk.cli.image.store": ("push", "trace", "pull", "unpin", "list", "gc"),
        "btrfs_ublk.cli.image.run": ("up", "down", "run"),
        "btrfs_ublk.cli.image.forks": (
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
