"""``btrfs-ublk snapshotter``"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.capabilities import CONTAINER_PACKAGES, require
from btrfs_ublk.base.entry import PathType, SecondsType, json_option, print_found
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.text import visible
from btrfs_ublk.cli.image.options import with_access
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import format_size
from btrfs_ublk.volume.definition import SETTINGS

if TYPE_CHECKING:
    from btrfs_ublk.containers.status import Status

_ROOT = "/var/lib/btrfs-ublk/snapshotter"
_SOCKET = "/run/btrfs-ublk/snapshotter.sock"
_CONTAINERD = "/run/containerd/containerd.sock"

_POLL_S = 0.2

_socket = click.option(
    "--socket", type=PathType(), default=_SOCKET, help="Where containerd asks."
)
_root = click.option(
    "--root",
    type=PathType(),
    default=_ROOT,
    help="A directory of a writable btrfs, where snapshots are kept.",
)


@click.group("snapshotter")
def command() -> None:
    """Make snapshots for containerd, as subvolumes of a btrfs.

    It is a proxy plugin: containerd asks it over a Unix socket.
    """


@command.command("serve")
@_root
@_socket
@click.option(
    "--require-lazy",
    is_flag=False,
    flag_value="sealed",
    type=click.Choice(["sealed", "all"]),
    help="Refuse to unpack images that have a sealed one; with =all, any image.",
)
@click.option(
    "--repository",
    "repositories",
    multiple=True,
    metavar="REGISTRY/REPOSITORY",
    help="Where to look for sealed images when containerd does not say it; repeatable.",
)
@click.option(
    "--indexes",
    is_flag=True,
    help="Look for indexes (image index) of images that have no sealed one.",
)
@click.option(
    "--writable",
    default="64G",
    metavar="SIZE",
    help="What containers of one sealed image can write, together.",
)
@click.option(
    "--cache-max",
    default="0",
    metavar="SIZE",
    help="A cap on the cache of each sealed image; 0: none.",
)
@click.option(
    "--complete",
    metavar="RATE",
    help="Fetch all of sealed images by itself, at 50M/s or when idle.  [off]",
)
@click.option(
    "--mode",
    type=click.Choice(["snapshot", "overlay"]),
    default="snapshot",
    help="What containers are; overlays of one image share the page cache.",
)
@click.option(
    "--containerd",
    type=PathType(),
    default=_CONTAINERD,
    help="Which containerd gets the layers that it asks for (config --diff).",
)
@click.option(
    "--credential-provider-config",
    type=PathType(exists=True),
    help="The kubelet's CredentialProviderConfig, or a directory of such files: its "
    "plugins are asked for logins.",
)
@click.option(
    "--credential-provider-bin-dir",
    type=PathType(exists=True, file_okay=False),
    help="Where the programs of these plugins are.",
)
@with_access
def serve_command(
    root: Path,
    socket: Path,
    require_lazy: Literal["sealed", "all"] | None,
    repositories: Sequence[str],
    indexes: bool,
    writable: str,
    cache_max: str,
    complete: str | None,
    mode: Literal["snapshot", "overlay"],
    containerd: Path,
    credential_provider_config: Path | None,
    credential_provider_bin_dir: Path | None,
    access: images.RegistryAccess,
) -> None:
    """Answer containerd until a signal comes.

    Containers go on while it is stopped; only what needs a new snapshot fails
    meanwhile.

    Images that were pushed by `image push` arrive when they are read, if
    /etc/btrfs-ublk/images.toml allows it, and containerd tells where they are.
    """
    require(*CONTAINER_PACKAGES)
    with deferred():
        # Nothing else needs gRPC.
        from btrfs_ublk.containers.images import LazyOptions
        from btrfs_ublk.containers.kubelet_logins import Plugin, read_plugins
        from btrfs_ublk.containers.service import serving
        from btrfs_ublk.device.notify import notify
    for repository in repositories:
        images.parse_repository(repository, "--repository")
    settings = {
        key: SETTINGS[key].parse(value)
        for key, value in (
            ("writable", writable),
            ("cache_max", cache_max),
            ("complete", complete or "off"),
        )
    }
    plugins: Sequence[Plugin] = ()
    if (credential_provider_config is None) != (credential_provider_bin_dir is None):
        raise UsageError(
            "--credential-provider-config and --credential-provider-bin-dir belong "
            "together",
            hint="give both, as to the kubelet",
        )
    if credential_provider_config and credential_provider_bin_dir:
        plugins = read_plugins(credential_provider_config, credential_provider_bin_dir)
    options = LazyOptions(
        access=access,
        plugins=plugins,
        repositories=repositories,
        indexes=indexes,
        require=require_lazy,
        writable_bytes=settings["writable"],
        cache_max_bytes=settings["cache_max"],
        complete=settings["complete"],
    )
    with serving(root, socket, options, mode=mode, containerd=containerd) as server:
        click.echo(f"listening on {socket}")
        notify("READY=1")
        server.wait_for_termination()


@command.command("status")
@_socket
@click.option(
    "--wait",
    "wait_s",
    type=SecondsType(min=0),
    default=0,
    help="How long to wait for one that starts.",
)
@json_option
def status_command(socket: Path, wait_s: float, as_json: bool) -> int:
    """Print whether it serves, and what it has.

    How many snapshots of each kind there are, and the space that they use by the file
    system's quotas. Of each image, whether its layers are lazy or ordinary ones; of
    sealed ones, how much of their data is on this machine. How many layers were
    unpacked though they might have been lazy, and why.

    Exit status 1: nobody serves at the socket; 3: gRPC for Python is missing.
    """
    require(*CONTAINER_PACKAGES)
    with deferred():
        from btrfs_ublk.containers.status import ask
    found: dict[str, Any] = {"socket": str(socket), "serves": True}
    end_s = time.monotonic() + wait_s
    while True:
        try:
            status = ask(socket)
            break
        except BtrfsUblkError as error:
            if time.monotonic() < end_s:
                time.sleep(_POLL_S)
                continue
            if not as_json:
                raise
            found |= {"serves": False, "error": str(error)}
            click.echo(json.dumps(found, indent=2))
            return 1
    found |= asdict(status)
    print_found(found, _status_lines(socket, status), as_json=as_json)
    return 0


def _status_lines(socket: Path, status: Status) -> Iterator[str]:
    yield f"{socket}: serves {status.root}, version {status.version}"
    kinds = [f"{number} {kind}" for kind, number in status.snapshots.items()]
    used = "not known: there are no simple quotas"
    if status.used_bytes is not None:
        used = format_size(status.used_bytes)
    yield f"snapshots: {', '.join(kinds)}; space used: {used}"
    for name, counts in status.layers.items():
        numbers = f"{counts['lazy']} lazy layers, {counts['ordinary']} ordinary"
        yield f"{visible(name or 'images without a reference')}: {numbers}"
    for image in status.images:
        yield f"sealed: {_sealed(image)}"
    for reason, count in status.fallbacks.items():
        yield f"layers that did not arrive lazily ({reason}): {count}"


def _sealed(image: Mapping[str, Any]) -> str:
    about = [visible(image["name"]), f"volume {image['volume']}"]
    about.append("up" if image["is_up"] else "not up")
    if image["problem"]:
        about.append(visible(image["problem"]))
    if image["fetched_bytes"] is not None:
        fetched, total = image["fetched_bytes"], image["data_bytes"]
        about.append(f"{format_size(fetched)} of {format_size(total)} fetched")
    if image["failed_reads"]:
        about.append(f"{image['failed_reads']} reads failed")
    return ", ".join(about)


@command.command("config")
@_root
@_socket
@click.option(
    "--name",
    default="btrfs-ublk",
    metavar="NAME",
    help="What containerd calls it; BuildKit wants overlaybd.",
)
@click.option(
    "--diff",
    "has_diff",
    is_flag=True,
    help="Also have containerd 2 ask it what has changed in a snapshot, so that builds "
    "do not read the image.",
)
def config_command(root: Path, socket: Path, name: str, has_diff: bool) -> None:
    """Print what /etc/containerd/config.toml needs.

    The file begins with `version = 2`, or, with containerd 2, `version = 3`.

    The second table has containerd 2 tell us where images are, and the kubelet where
    they are kept. containerd 1.6 and 1.7 take the former from
    `disable_snapshot_annotations = false` in CRI's table. The others are for the
    transfer service, by which containerd 2 pulls: it unpacks for none but these.
    """
    click.echo(
        f"""\
[proxy_plugins.{name}]
  type = "snapshot"
  address = "{socket}"
  capabilities = ["remap-ids"]
  [proxy_plugins.{name}.exports]
    enable_remote_snapshot_annotations = "true"
    root = "{root}"

[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux"
  snapshotter = "{name}"
  differ = "walking"
# containerd's default, which it leaves out as soon as there is a table:
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux"
  snapshotter = "overlayfs"
  differ = "walking"
""",
        nl=False,
    )
    if has_diff:
        click.echo(
            f"""\

[proxy_plugins.{name}-diff]
  type = "diff"
  address = "{socket}"
[plugins."io.containerd.service.v1.diff-service"]
  default = ["{name}-diff", "walking"]
""",
            nl=False,
        )
