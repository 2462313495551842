"""The commands of ``btrfs-ublk image`` that work on what is up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from btrfs_ublk import image as images
from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import PathType, SizeType
from btrfs_ublk.base.progress import progress
from btrfs_ublk.base.text import visible
from btrfs_ublk.cli.image.options import tell, with_access
from btrfs_ublk.cli.volume_options import on_volume, removing
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import format_size
from btrfs_ublk.volume.texts import fork_text, forks_text


@on_volume(
    click.argument("fork"),
    click.option(
        "--from",
        "source",
        metavar="FORK",
        help="Another fork, which this one copies: a checkpoint.  [the image]",
    ),
    click.option(
        "--mode",
        type=click.Choice(volumes.FORK_MODES),
        default=volumes.DEFAULT_FORK_MODE,
        help="An overlay shares memory with other forks; a snapshot is all of btrfs.",
    ),
    click.option(
        "--quota",
        type=SizeType(),
        help="How much may be written to it. The volume needs Linux 6.7 from then on, "
        "for good.  [no limit, or that of --from]",
    ),
    click.option(
        "--layer",
        metavar="CHAIN-ID",
        help="Another layer.  [the last: the whole image]",
    ),
)
def fork(
    name: str,
    fork: str,
    source: str | None,
    mode: volumes.ForkMode,
    quota: int | None,
    layer: str | None,
    base: Path | None,
    as_json: bool,
) -> None:
    """Make a writable copy of an image's root file system.

    NAME is a volume that `image up` has mounted, FORK a name of yours. No data are
    moved. It is below `forks`, and is kept with the volume. With --from, it has all
    that the other fork has at this moment, in the same mode, with its quota unless
    another one is given; that fork may be in use.
    """
    if source is not None:
        _refuse_given(
            ("mode", "layer"), "has no meaning with --from, whose fork has both"
        )
    made = volumes.fork_image(
        name, fork, source=source, layer=layer, mode=mode, quota_bytes=quota, base=base
    )
    keys = {"name": name, "fork": fork, "path": str(made)}
    keys |= {"mode": mode} if source is None else {"from": source}
    click.echo(fork_text(keys, as_json=as_json))


@on_volume(
    click.argument("fork"),
)
def changes(name: str, fork: str, base: Path | None, as_json: bool) -> None:
    """List what a fork has changed.

    NAME is a volume that `image up` has mounted. Each path of FORK has an A if it was
    added, a C if it was changed, and a D if it was removed; a directory is changed if
    its mode or owner is. No data of the image are read.
    """
    found = volumes.diff_fork(name, fork, base=base)
    if as_json:
        keys = [{"change": change, "path": str(path)} for change, path in found]
        click.echo(json.dumps(keys, indent=2))
        return
    letters = {"added": "A", "changed": "C", "removed": "D"}
    for change, path in found:
        click.echo(f"{letters[change]} {visible(str(path))}")


@on_volume()
def forks(name: str, base: Path | None, as_json: bool) -> None:
    """List the forks of an image.

    NAME is a volume that `image up` has mounted. USED is what was written to a fork
    since the first one with a quota was made.
    """
    found = volumes.forks_of_image(name, base=base)
    click.echo(forks_text(found, as_json=as_json))


@removing("fork", "Remove fork {} of {}, with all that was written to it?")
def unfork(name: str, fork: str, base: Path | None) -> None:
    """Remove a fork of an image.

    NAME is a volume that `image up` has mounted. All that was written to FORK is lost.
    Asks before, without --yes.
    """
    volumes.unfork_image(name, fork, base=base)


@on_volume(
    click.argument("fork"),
    click.option(
        "-t",
        "--tag",
        "target",
        metavar="IMAGE",
        help="Its name: oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG.",
    ),
    click.option(
        "--delta",
        type=PathType(),
        help="Instead: a new file of what has changed, for `image apply`.",
    ),
    click.option(
        "--compression",
        type=click.Choice(images.COMPRESSIONS),
        default="gzip",
        help="Of the new layer; all clients know gzip.",
    ),
)
@with_access
def commit(
    name: str,
    fork: str,
    target: str | None,
    delta: Path | None,
    compression: images.Compression,
    base: Path | None,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Make an ordinary image of what a fork shows.

    It has the layers of the image that NAME, a volume, is of, and one of what FORK has
    changed. Only what has changed is read, but all of a file that has changed, as
    layers have whole files. In a registry, layers that are there are not sent.

    Options of the registry are those of IMAGE's; without any, it is asked as that of
    the volume's image. With --delta, no image is made: the file has what has changed,
    and no data of the image are read. An image that was built of a directory or a tar
    has no layers: take --delta, or `image build` the fork's directory.
    """
    if (target is None) == (delta is None):
        raise UsageError(
            "one of --tag and --delta is needed"
            + ("" if target is None else ", not both"),
            hint="--tag REGISTRY/REPOSITORY:TAG makes an image, --delta FILE a file of"
            " what has changed",
        )
    if delta is not None:
        _refuse_given(
            ("compression", "docker_config", "ca_file", "insecure"),
            "has no meaning with --delta, which makes no image",
        )
        with progress(f"write the delta of fork {fork} of {name}"):
            size_bytes = volumes.write_delta(name, fork, delta, base=base)
        keys = {"delta": str(delta), "size_bytes": size_bytes}
        tell(None, as_json, keys, f"{format_size(size_bytes)} in {delta}")
        return
    assert target is not None
    made = images.parse_name(target)
    if isinstance(made, images.Reference) and made.digest is not None:
        raise UsageError(
            f"{target} has a digest, which follows from the content",
            hint="name a tag: REGISTRY/REPOSITORY:TAG",
        )
    if isinstance(made, images.LayoutName):
        made = replace(made, path=made.path.absolute())
    with progress(f"commit fork {fork} of {name}") as task:
        image, sockets = volumes.commit_fork(
            name,
            fork,
            made,
            access=None if access == images.RegistryAccess() else access,
            compression=compression,
            base=base,
            say=task.say,
        )
    note = (
        f"a layer of {format_size(image.layer_bytes)}; "
        f"{format_size(image.sent_bytes)} sent"
        + (f"\nbtrfs-ublk: {sockets} sockets are left out" if sockets else "")
    )
    tell(image.name, as_json, vars(image) | {"sockets_left_out": sockets}, note)


def _refuse_given(keys: tuple[str, ...], why: str) -> None:
    context = click.get_current_context()
    for key in keys:
        if context.get_parameter_source(key) is not click.core.ParameterSource.DEFAULT:
            option = "--" + key.replace("_", "-")
            raise UsageError(f"{option} {why}", hint="leave it out")


@on_volume(
    click.argument("file", type=PathType(exists=True, dir_okay=False)),
    click.argument("fork"),
)
def apply(name: str, file: Path, fork: str, base: Path | None, as_json: bool) -> None:
    """Make a fork of what has changed in another.

    NAME is a volume that `image up` has mounted, FILE what `image commit --delta` has
    made in a volume of the same image. FORK, a name of yours, is then equal to that
    fork. No data of the image are read. FILE tells root what to make: take it only
    from those whose images you would take.
    """
    with progress(f"apply {file} to {name}"):
        made = volumes.apply_delta(name, file, fork, base=base)
    tell(made, as_json, {"name": name, "fork": fork, "path": str(made)})


@on_volume()
def detach(name: str, base: Path | None, as_json: bool) -> None:
    """Make all data of an image local, for good.

    NAME is a volume that `image up` has mounted; it can be used meanwhile. All that was
    not read yet is fetched, and is in the volume then; the image may go. It needs as
    much room as the image has data; `volume resize` makes more. Stopped, or after an
    error, it goes on where it was.
    """
    with progress(f"detach {name}", in_bytes=True) as task:
        done = volumes.detach_image(
            name, base=base, expect=task.expect, progress=task.advance
        )
    count = done.copied_bytes
    note = f"{format_size(count)} copied" if count else f"volume {name} was detached"
    tell(None, as_json, {"name": name, "copied_bytes": count}, note)
