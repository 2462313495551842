"""``btrfs-ublk snapshotter``"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.base.capabilities import CONTAINER_PACKAGES, require
from btrfs_ublk.base.entry import PathType, json_option
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.units import format_size

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


@command.command("status")
@_socket
@json_option
def status_command(socket: Path, as_json: bool) -> int:
    """Print whether it serves, and what it has.

    How many snapshots of each kind there are, and the space that they use by the file
    system's quotas.

    Exit status 1: nobody serves at the socket.
    """
    require(*CONTAINER_PACKAGES)
    with deferred():
        from btrfs_ublk.containers.status import ask
    found: dict[str, Any] = {"socket": str(socket), "serves": True}
    try:
        status = ask(socket)
    except BtrfsUblkError as error:
        if not as_json:
            raise
        found |= {"serves": False, "error": str(error)}
        click.echo(json.dumps(found, indent=2))
        return 1
    if as_json:
        click.echo(json.dumps(found | asdict(status), indent=2))
        return 0
    click.echo(f"{socket}: serves {status.root}, version {status.version}")
    kinds = [f"{number} {kind}" for kind, number in status.snapshots.items()]
    used = "not known: there are no simple quotas"
    if status.used_bytes is not None:
        used = format_size(status.used_bytes)
    click.echo(f"snapshots: {', '.join(kinds)}; space used: {used}")
    return 0


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
