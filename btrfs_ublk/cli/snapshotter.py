"""``btrfs-ublk snapshotter``"""

from __future__ import annotations

from pathlib import Path

import click

from btrfs_ublk.base.capabilities import CONTAINER_PACKAGES, require
from btrfs_ublk.base.entry import PathType
from btrfs_ublk.base.signals import deferred

_ROOT = "/var/lib/btrfs-ublk/snapshotter"
_SOCKET = "/run/btrfs-ublk/snapshotter.sock"

_socket = click.option(
    "--socket", type=PathType(), default=_SOCKET, help="Where containerd asks."
)


@click.group("snapshotter")
def command() -> None:
    """Make snapshots for containerd, as subvolumes of a btrfs.

    It is a proxy plugin: containerd asks it over a Unix socket.
    """


@command.command("serve")
@click.option(
    "--root",
    type=PathType(),
    default=_ROOT,
    help="A directory of a writable btrfs, where snapshots are kept.",
)
@_socket
def serve_command(root: Path, socket: Path) -> None:
    """Answer containerd until a signal comes.

    Containers go on while it is stopped; only what needs a new snapshot fails
    meanwhile.
    """
    require(*CONTAINER_PACKAGES)
    with deferred():
        # Nothing else needs gRPC.
        from btrfs_ublk.containers.service import serving
        from btrfs_ublk.device.notify import notify
    with serving(root, socket) as server:
        click.echo(f"listening on {socket}")
        notify("READY=1")
        server.wait_for_termination()


@command.command("config")
@_socket
def config_command(socket: Path) -> None:
    """Print what /etc/containerd/config.toml needs."""
    click.echo(
        f"""\
[proxy_plugins.btrfs-ublk]
  type = "snapshot"
  address = "{socket}"
""",
        nl=False,
    )
