"""``btrfs-ublk volume``"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from btrfs_ublk import device as devices
from btrfs_ublk import image as images
from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import (
    CountType,
    NounGroup,
    PathType,
    SizeType,
    former_realtime_option,
    json_option,
    print_rows,
    say_resolved,
)
from btrfs_ublk.base.progress import progress
from btrfs_ublk.base.signals import too_late
from btrfs_ublk.cli.image.options import platform_option, via_options, with_access
from btrfs_ublk.cli.volume_options import (
    confirm,
    on_volume,
    removing,
    setting_option,
    take_down,
    volume_name,
    volumes_base,
    with_source_access,
)
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.units import format_size, parse_block_size
from btrfs_ublk.volume.texts import volume_text, volumes_text

_File = TypeVar("_File", bound=volumes.VolumeFile)


@click.group(
    "volume",
    cls=NounGroup,
    aliases={"ls": "list", "rm": "remove", "show": "status", "stop": "down"},
)
def command() -> None:
    """Have lazy volumes that keep their data, also after a reboot.

    A volume has a NAME, as a device has, and a device of that name while it is up.
    Files are added to it whose content is elsewhere: it arrives when it is read. What
    is written stays with the volume's other data, in a directory of its own.
    """


@on_volume(
    click.option(
        "--file",
        type=PathType(exists=True, dir_okay=False),
        help="A definition (TOML) instead of options.",
    ),
    *(setting_option(key) for key, x in volumes.SETTINGS.items() if x.kind.type),
    click.option(
        "--add-file",
        "files",
        multiple=True,
        metavar="PATH=URL",
        help="A file of the volume, and where its content is: http, https, s3,"
        " oci, /PATH, or JSON. May be repeated.",
    ),
    click.option(
        "--add-tree",
        "trees",
        multiple=True,
        metavar="PATH=SOURCE",
        help="A directory, and what lists its files: s3://BUCKET/PREFIX/, or the"
        " index of a web server. May be repeated.",
    ),
    click.option(
        "--url-file",
        "url_files",
        multiple=True,
        metavar="PATH=FILE",
        help="Like --add-file, but the URL is in a file, mode 600, that the"
        " server reads: a signed one is a secret.",
    ),
    with_source_access,
    former_realtime_option,
)
def up(
    name: str,
    file: Path | None,
    base: Path | None,
    as_json: bool,
    files: tuple[str, ...],
    url_files: tuple[str, ...],
    trees: tuple[str, ...],
    access: volumes.Access,
    **options: Any,
) -> None:
    """Mount a volume, and print where it is.

    It is made when there is none of that name, and an option says something of it. Its
    settings come from --file, else from /etc/btrfs-ublk/volumes/NAME.toml, else from
    the options, which are kept with its data: next time, NAME will do. Repeated, it
    changes nothing; new files are added also while it is up.
    """
    given = {key: value for key, value in options.items() if value is not None}
    is_default = False
    if file is not None:
        definition = volumes.read_definition(file)  # whatever the others are
    else:
        found = volumes.find_definition(name, base=base)
        definition, file = found.definition, found.file
        is_default = found.is_default
    added = _entries("--add-file", volumes.VolumeFile.parse, files)
    added += _entries("--url-file", volumes.VolumeFile.parse_url_file, url_files)
    listed = _entries("--add-tree", volumes.VolumeTree.parse, trees)
    if file is not None and (given or added or listed):
        adding = {"add-file": files, "url-file": url_files, "add-tree": trees}
        first = next(iter(given), "") or next(x for x in adding if adding[x])
        first = first.replace("_", "-")
        raise UsageError(
            f"volume {name!r} is defined in {file}, which --{first} cannot change",
            hint="write it there",
        )
    if is_default and not given and not added and not listed:
        names = ", ".join(x.name for x in volumes.list_volumes(base=base, files=False))
        raise UsageError(
            f"there is no volume {name!r}",
            hint=f"there are: {names or 'none'}; a new one needs a setting, or"
            " something to have: --size 64T makes an empty one, --add-file and"
            " --image another",
        )
    definition = _changed(definition, given)
    entered = access.given_to([*added, *listed])
    definition = definition.with_files(entered[: len(added)])
    definition = definition.with_trees(
        [x for x in entered if isinstance(x, volumes.VolumeTree)]
    )
    images: list[tuple[str, str]] = []
    with progress(f"bring volume {name} up"):
        volume = volumes.up_volume(
            name,
            definition,
            base=base,
            made=too_late,
            resolved=lambda *image: images.append(image),
            files=as_json,
        )
    for image in images:
        say_resolved(*image)
    click.echo(json.dumps(volume.to_dict()) if as_json else volume.mount)


def _changed(
    definition: volumes.VolumeDefinition, options: dict[str, Any]
) -> volumes.VolumeDefinition:
    given = ((volumes.SETTINGS[key], value) for key, value in options.items())
    return replace(definition, **{each.name: each.parse(x) for each, x in given})


@on_volume()
def down(name: str, base: Path | None, as_json: bool) -> None:
    """Unmount a volume, and keep its data.

    Its device goes as well. Refused while somebody uses it: it says who. Also puts in
    order what a killed command left.
    """
    take_down(name, base, as_json=as_json)


@on_volume(click.option("--yes", is_flag=True, help="Do not ask."))
def remove(name: str, yes: bool, base: Path | None, as_json: bool) -> None:
    """Remove a volume that is down, with its data.

    All that was written to it is lost, and its snapshots. Asks before, without --yes.
    """
    volume = volumes.show_volume(name, base=base)
    if not yes:
        if volumes.may_be_up(volumes.volume_directory(name, base)):
            raise LeftoverError(
                f"volume {name!r} is {volume.state}: only one that is down is removed",
                hint=f"first: btrfs-ublk volume down {name}",
            )
        lost = "all that was written to it (how much is unknown)"
        if volume.used_bytes is not None:
            size = format_size(volume.used_bytes)
            lost = f"{size} that were written to the volume"
        confirm(f"Remove {volume.directory}, with {lost}?")
    volumes.remove_volume(name, base=base)
    if as_json:
        click.echo(json.dumps({"name": name, "result": "removed"}))


@on_volume(click.argument("size", type=SizeType(parse_block_size)))
def resize(name: str, size: int, base: Path | None, as_json: bool) -> None:
    """Have more room for what is written to a volume.

    SIZE is what --writable of `volume up` was; it only grows. A volume that is up has
    it at once, also while programs write to it; one that is down, when it is up again.
    """
    with progress(f"resize volume {name}"):
        volume = volumes.resize_volume(name, size, base=base)
    if as_json:
        click.echo(json.dumps(volume.to_dict()))
    elif volume.state == "down":
        click.echo(
            f"volume {name} is down: it has that with: btrfs-ublk volume up {name}",
            err=True,
        )


@command.command("list")
@volumes_base
@json_option
def list_command(base: Path | None, as_json: bool) -> None:
    """List all volumes, and how they are.

    up, down, changing (a command works on it), broken (neither up nor down, or not
    whole), damaged (its files are invalid): `volume status` says why.
    """
    found = volumes.list_volumes(base=base, files=as_json)
    click.echo(volumes_text(found, as_json=as_json))


@on_volume()
def status(name: str, base: Path | None, as_json: bool) -> int:
    """Show a volume, and what is in it.

    Of each file whose content is elsewhere, it says how much was fetched, and is in the
    cache. Text has the first twenty of them, JSON all.

    Exit status 0: it is up; 1: it is down, or broken (it says why).
    """
    volume = volumes.show_volume(name, base=base, files=as_json)
    click.echo(volume_text(volume, as_json=as_json))
    return 0 if volume.is_up else 1


@command.command()
@volume_name
@click.option(
    "-n",
    "--lines",
    type=CountType(0),
    default=100,
    show_default=True,
    help="Only that many of the last lines.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines as they come.")
@volumes_base
def logs(name: str, lines: int, follow: bool, base: Path | None) -> None:
    """Print what supervisor and server of a volume have said.

    The file is that of its device, and goes with it when the volume is taken down.
    """
    volume = volumes.show_volume(name, base=base)
    log = devices.device_directory(name).log
    if volume.device is None or not log.exists():
        raise UsageError(
            f"volume {name!r} is {volume.state}, and has no log",
            hint=f"it begins with: btrfs-ublk volume up {name}",
        )
    words = ["tail", f"--lines={lines}", *(["--follow=name"] if follow else [])]
    os.execvp("tail", [*words, "--", str(log)])


@on_volume(
    click.argument("path"),
    click.option("--offset", required=True, type=SizeType(), help="In virtual data."),
    click.option("--length", required=True, type=SizeType(), help="Number of bytes."),
)
def clone(
    name: str, path: str, offset: int, length: int, base: Path | None, as_json: bool
) -> None:
    """Make a file of a range of the virtual data.

    PATH is where it will be in the volume; nothing is there yet. For what was mapped by
    hand: `btrfs-ublk map add NAME …` prints offset and length. No data are moved. Says
    how much of it is not mapped.
    """
    made = volumes.clone_in_volume(
        name, path, offset=offset, size_bytes=length, base=base
    )
    with suppress(BtrfsUblkError):  # the file exists even if the server fails
        if missing := volumes.unmapped_bytes(name, offset=offset, size_bytes=length):
            click.echo(
                f"warning: {missing} of {length} bytes are not mapped: reading "
                f"them fails (EIO) until they are: btrfs-ublk map add {name}",
                err=True,
            )
    keys = {"path": str(made), "offset": offset, "size_bytes": length}
    click.echo(json.dumps(keys) if as_json else made)


@on_volume(click.argument("snapshot"))
def snapshot(name: str, snapshot: str, base: Path | None, as_json: bool) -> None:
    """Make a snapshot of a volume.

    NAME is a volume that is up, SNAPSHOT a name of yours. No data are moved, and who
    writes to the volume goes on. It is kept with the volume, out of sight of its users.
    Trees that were added are in it as well.
    """
    made = volumes.snapshot_volume(name, snapshot, base=base)
    if as_json:
        click.echo(json.dumps(vars(made)))


@on_volume()
def snapshots(name: str, base: Path | None, as_json: bool) -> None:
    """List the snapshots of a volume.

    NAME is a volume that is up. TIME is when a snapshot was made; of what a rollback
    has kept, when that was last changed.
    """
    found = volumes.snapshots_of_volume(name, base=base)
    if as_json:
        click.echo(json.dumps([vars(each) for each in found], indent=2))
        return
    rows = [("SNAPSHOT", "TIME")]
    for each in found:
        when = datetime.fromtimestamp(each.time_s, UTC).isoformat()
        rows.append((each.name, when.replace("+00:00", "Z")))
    print_rows(rows)


@removing("snapshot", "Remove snapshot {} of {}, with all that only it has?")
def remove_snapshot(name: str, snapshot: str, base: Path | None) -> None:
    """Remove a snapshot of a volume.

    NAME is a volume that is up, which stays as it is. The kernel frees the space that
    only SNAPSHOT uses, a little later. Asks before, without --yes.
    """
    volumes.remove_snapshot(name, snapshot, base=base)


@on_volume(click.argument("snapshot"))
def rollback(name: str, snapshot: str, base: Path | None, as_json: bool) -> None:
    """Bring a volume back to a snapshot.

    NAME is a volume that is up, which goes down and comes up again for that: refused
    while somebody uses it, and it says who. What it had before is kept as another
    snapshot, whose name it says; SNAPSHOT stays as well.
    """
    with progress(f"roll volume {name} back"):
        kept = volumes.rollback_volume(name, snapshot, base=base)
    if as_json:
        click.echo(json.dumps({"name": name, "snapshot": snapshot, "kept": kept}))
    else:
        click.echo(f"what it had before is snapshot {kept}", err=True)


def _entries(
    option: str, parse: Callable[[str], _File], texts: Sequence[str]
) -> list[_File]:
    """Parse the values of an option, or of an argument, which errors name."""
    try:
        return [parse(text) for text in texts]
    except UsageError as error:
        error.prefix(option)
        raise


@on_volume(click.argument("file", metavar="FILE=URL"), with_source_access)
def add_file(
    name: str, file: str, access: volumes.Access, base: Path | None, as_json: bool
) -> None:
    """Add a file to a volume, and print where it is.

    FILE=URL is its path in the volume NAME, which is up, and where its content is, as
    for --add-file of `volume up`: it arrives when it is read. The definition has the
    file from then on.
    """
    (entry,) = access.given_to(_entries("FILE=URL", volumes.VolumeFile.parse, [file]))
    with progress(f"add {entry.path} to volume {name}"):
        path, made = volumes.add_file(name, entry, base=base, resolved=say_resolved)
    if as_json:
        keys = {"offset": made.offset, "size_bytes": made.size_bytes}
        click.echo(json.dumps({"name": name, "path": str(path), **keys}))
        return
    click.echo(path)
    click.echo(f"{format_size(made.size_bytes)} from {entry.origin}", err=True)


@removing("file", "Remove {} of volume {}, with all that was written to it?")
def remove_file(name: str, file: str, base: Path | None) -> None:
    """Remove a file from a volume and its definition.

    FILE is the path of one that `volume up` or `volume add-file` has made in the volume
    NAME, which is up. What was written to it is lost; other files, copies of it too,
    stay. Its content stays mapped, and in the cache until that needs the room. Asks
    before, without --yes.
    """
    volumes.remove_file(name, file, base=base)


@on_volume(
    click.argument("image"),
    click.argument("path", required=False),
    click.option(
        "--layer",
        metavar="CHAIN-ID",
        help="Another layer.  [the last: the whole image]",
    ),
    with_access,
    via_options,
)
def add_image(
    name: str,
    image: str,
    path: str | None,
    layer: str | None,
    base: Path | None,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Add the tree of a sealed image to a volume.

    IMAGE is oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG or @DIGEST, built with
    --compression none. Its files are made again in the volume NAME, which is up, in a
    new subvolume PATH; without it, that has the tag of a layout, else the last part of
    the repository's name. They can be written to, as all files of the volume. Their
    data stay where they are until they are read; only small files are written. Many
    images can be in one volume.
    """
    with progress(f"add {image} to volume {name}", total=0) as task:
        added = volumes.add_image(
            name,
            images.parse_name(image),
            path,
            layer=layer,
            access=access,
            base=base,
            task=task,
        )
    _print_added(added, as_json=as_json)


@on_volume(
    click.argument("source"), click.argument("path"), platform_option, with_access
)
def add_tree(
    name: str,
    source: str,
    path: str,
    platform: str | None,
    base: Path | None,
    access: images.RegistryAccess,
    as_json: bool,
) -> None:
    """Add a directory, a tar or an ordinary image to a volume.

    SOURCE is a directory, a tar, oci:DIRECTORY[:TAG], or REGISTRY/REPOSITORY:TAG, as in
    `image build`. It is read once: its data, equal content once, are put into a file in
    the directory of the volume NAME, which is up, and the tree is made of that as by
    `volume add-image`, at PATH. SOURCE is not needed any more then.
    """
    with progress(f"add {source} to volume {name}", total=0) as task:
        added = volumes.add_tree(
            name,
            images.parse_source(source),
            path,
            platform=platform,
            access=access,
            base=base,
            task=task,
        )
    _print_added(added, as_json=as_json)


def _print_added(added: volumes.AddedTree, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(added.to_dict()))
        return
    click.echo(added.path)
    click.echo(
        f"{added.entries} entries; {format_size(added.cloned_bytes)} are clones, "
        f"{format_size(added.written_bytes)} were written",
        err=True,
    )


for _each in (
    *(up, down, remove, resize, status, clone, snapshot, snapshots, rollback),
    *(remove_snapshot, add_file, remove_file, add_image, add_tree),
):
    command.add_command(_each)
