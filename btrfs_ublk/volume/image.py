"""Volumes of sealed images: the map has the image's data object, whole, and forks are
made of its layers. The seed comes from the image's metadata pack (image_seed.py).

A volume copies what it needs of an image, but its data: they stay in the registry or
the layout until they are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from btrfs_ublk import content
from btrfs_ublk import device as devices
from btrfs_ublk.base.log import step
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.content import SourceKeys
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import filesystem_uuid
from btrfs_ublk.units import BLOCK_BYTES
from btrfs_ublk.volume.definition import (
    DEFAULT_FORK_MODE,
    ForkMode,
    VolumeDefinition,
    image_access,
)
from btrfs_ublk.volume.forks import (
    LAYERS_DIRECTORY,
    OUR_DIRECTORIES,
    Fork,
    copy_fork,
    list_forks,
    look_up_fork,
    make_fork,
    remove_fork,
)
from btrfs_ublk.volume.report import look_at_volume
from btrfs_ublk.volume.store import VolumeDirectory, locked_volume

#: Keys of a mirror that say how its registry is asked; a definition's begin "image_".
_ACCESS_KEYS = ("docker_config", "ca_file", "insecure")
#: Keys of a source of an image that are not those of its mirror.
_SOURCE_KEYS = ("size", "unit", "root", "codec", "digests", "index", "selection")
#: Units of what comes first that are asked for at once: in order, in two requests.
_FIRST_AT_ONCE = 8
_STAYS_HINT = "that stays: leave it so, or make another volume"


def refuse_another_image(volume: VolumeDirectory, definition: VolumeDefinition) -> None:
    """Raise UsageError when the volume was made of another image, or of none."""
    image = volume.made().image
    name = image["name"] if image else None
    if name != definition.image:
        raise UsageError(
            f"volume {volume.name!r} was made of {name or 'no image'}, not of "
            f"{definition.image or 'none'}",
            hint=_STAYS_HINT,
        )
    if image and (refusal := refuse_other_access(_any_source(image), definition)):
        raise UsageError(f"volume {volume.name!r} {refusal}", hint=_STAYS_HINT)


def _any_source(image: dict[str, Any]) -> SourceKeys | None:
    """Return one of the places where the data of an image are, if it has any."""
    source: SourceKeys | None = image["source"]
    return source or next((x["source"] for x in image.get("sources", ())), None)


def data_bytes_of(image: dict[str, Any]) -> int:
    """Return how many bytes the data of an image have, by what volume.json says."""
    if image["source"]:
        return int(image["source"]["size"])
    return sum(int(x["length"]) for x in image.get("sources", ()))


def refuse_other_access(
    source: SourceKeys | None, definition: VolumeDefinition
) -> str | None:
    """Return why a definition does not fit an image whose data come from ``source``:
    how its registry is asked was kept with it. None: it fits."""
    if source is None or source["kind"] != "oci":
        return None
    given = image_access(definition).keys()
    for key in _ACCESS_KEYS:
        before, now = source.get(key), given.get(key)
        if before != now:
            return (
                f"was made with image_{key} {_shown(before)}, "
                f"and not with {_shown(now)}"
            )
    return None


def _shown(value: object) -> str:
    return "off" if value is None else "on" if value is True else str(value)


def _sources_of(image: dict[str, Any], directory: Path) -> list[tuple[int, SourceKeys]]:
    """Return all places where the data of an image are, as a map is told of them, with
    their offsets in the data."""
    from btrfs_ublk.image.pack import index_path, selection_path
    from btrfs_ublk.volume.image_seed import DIGESTS

    def file(path: Path) -> dict[str, str]:
        return {"path": str(path)}

    if image["source"]:
        return [(0, image["source"] | {"digests": file(directory / DIGESTS)})]
    return [
        (
            one["offset"],
            one["source"]
            | {
                "index": file(index_path(directory, number)),
                "selection": file(selection_path(directory, number)),
                "digests": file(directory / f"{DIGESTS}.{number}"),
            },
        )
        for number, one in enumerate(image["sources"])
    ]


def _with_mirrors(source: SourceKeys) -> SourceKeys:
    """Return a source with the mirrors of its registry before the registry itself."""
    from btrfs_ublk.image.access import registry_mirrors

    if source["kind"] != "oci":
        return source
    found = registry_mirrors(source["registry"])
    if not found:
        return source
    rest = {key: source[key] for key in _SOURCE_KEYS if key in source}
    own = {key: value for key, value in source.items() if key not in rest}
    common = {key: x for key, x in own.items() if key not in ("ca_file", "insecure")}
    return rest | {"mirrors": [*(common | x.keys() for x in found), own]}


def map_image(volume: VolumeDirectory, trace: Sequence[Sequence[int]] = ()) -> None:
    """Map the data of the volume's image, unless that was done before. ``trace`` has
    the extents of them that a start has read, as volume.json may have later."""
    image = volume.made().image
    if image is None or _any_source(image) is None:
        return
    client = devices.device_map(volume.name)
    # NB: of what is detached, it is 0.
    first_bytes = image.get("first_bytes", 0)
    if next(client.list(), None) is None:
        sources = _sources_of(image, volume.path)
        additions = [
            content.Addition(source=number, offset=offset)
            for number, (offset, _) in enumerate(sources)
        ]
        if 0 < first_bytes < sources[0][1].get("size", 0):
            # The server reads ahead to the end of a mapping. A start reads nothing of
            # what lies behind that which comes first.
            additions[:] = [
                content.Addition(offset=0, length=first_bytes),
                content.Addition(offset=first_bytes, source_offset=first_bytes),
            ]
        client.add(
            [_with_mirrors(source) for _, source in sources],
            additions,
            names=[f"the data of {image['name']}"] * len(sources),
        )
    if volume.fsid() is None:
        _read_first(client, image)
    # What is in the cache is passed over, so each `up` may begin with it.
    if traced := trace or image.get("trace"):
        # What was derived comes behind: a trace may be one of another command.
        _fetch_traced(client, image, [*traced, (0, first_bytes)])
    elif first_bytes:
        client.prefetch(end=first_bytes, at_once=_FIRST_AT_ONCE)


def _fetch_traced(
    client: content.MapClient, image: dict[str, Any], extents: Sequence[Sequence[int]]
) -> None:
    from btrfs_ublk.image.traces import placed

    offsets = [x["offset"] for x in image.get("sources", ())] or [0]
    sources = [
        (int(one["id"]), offset, int(one["size"]))
        for offset, one in zip(offsets, client.sources(), strict=False)
    ]
    found = placed([(start, length) for start, length in extents], sources)
    if found:
        client.prefetch(found, at_once=_FIRST_AT_ONCE)


def _read_first(client: content.MapClient, image: dict[str, Any]) -> None:
    """Read the first data of an image in a bucket or behind a web server. Raises
    BtrfsUblkError when they cannot be had: metadata are asked for by others than data,
    by other keys, and not in ranges. What has come up once needs none of that."""
    source = _any_source(image)
    if source is None or source["kind"] not in ("http", "s3"):
        return
    start = 0 if image["source"] else int(image["sources"][0]["offset"])
    with step("read the first data"):
        failed = client.drain(start=start, end=start + BLOCK_BYTES).failed_units
        found = client.stats()["fetcher"]
        # A cache sends all of an object at first, and a server without ranges always:
        # of a small one, that is kept.
        if not failed and (not found["whole_answers"] or found["whole_units"]):
            return
        # A slow answer is none that a volume cannot live with.
        problem = next(client.verify(ask_mirrors=True), None)
    if problem is not None:
        raise BtrfsUblkError(
            f"the data of {image['name']} cannot be read: {problem.text}",
            hint=problem.hint,
        )


def check_seed_of_image(volume: VolumeDirectory, target: Path) -> None:
    """Raise BtrfsUblkError when what the kernel has mounted is not the image, or the
    image has something where our directories will be. The seed is mounted alone."""
    found, expected = filesystem_uuid(target), volume.seed().fsid
    if found != expected:
        raise BtrfsUblkError(
            f"{volume.seed_image} holds btrfs {found}, and the image is {expected}",
            hint="another program has changed it: remove the volume, and make it again",
        )
    for name in OUR_DIRECTORIES:
        if os.path.lexists(target / name):
            raise BtrfsUblkError(
                f"the image has {name!r} at its top, where its volume has a directory "
                "of its own",
                hint="`image build` makes no such image: do not trust it",
            )


@dataclass(frozen=True)
class UpImage:
    """An image's volume that is up: its mount point, the image's name, the chain IDs of
    its layers, and how many bytes its data have; what its config says of commands in
    it; the volume's definition, its device, and the file that takes what is written."""

    mount: Path
    name: str
    layers: list[str]
    data_bytes: int
    config: dict[str, Any] | None
    definition: VolumeDefinition
    device: Path
    writable: Path


@contextmanager
def up_with_image(name: str, base: os.PathLike[str] | str | None) -> Iterator[UpImage]:
    """Lock a volume of an image that is up. Raises UsageError."""
    with locked_volume(name, base) as volume:
        made = volume.made()
        image = made.image
        if image is None:
            raise UsageError(
                f"volume {name!r} was not made of an image, so it has no layers",
                hint="see: btrfs-ublk volume list",
            )
        found = look_at_volume(volume, is_ours=True)
        if not found.is_up or found.mount is None or found.device is None:
            raise UsageError(
                f"volume {name!r} is {found.state}", hint=f"btrfs-ublk volume up {name}"
            )
        yield UpImage(
            mount=found.mount,
            name=image["name"],
            layers=image["layers"],
            data_bytes=data_bytes_of(image),
            config=image.get("config"),
            definition=volume.definition(),
            device=found.device,
            writable=volume.sprout_image,
        )


def fork_image(
    name: str,
    fork: str,
    *,
    source: str | None = None,
    layer: str | None = None,
    mode: ForkMode = DEFAULT_FORK_MODE,
    quota_bytes: int | None = None,
    base: os.PathLike[str] | str | None = None,
) -> Path:
    """Make a writable copy of the root file system of an image's volume that is up, in
    no time, below ``forks``: a snapshot, or an overlay. Returns its path.

    With ``source``, it is what the fork of that name is at this moment, in its mode.
    ``layer`` is the chain ID of another layer than the last. ``quota_bytes`` limits
    what may be written to it. Raises UsageError for a volume that is not up or of no
    image, and for a name that is taken, CapabilityError for a quota where there can be
    none.
    """
    with up_with_image(name, base) as up:
        if source is not None:
            return copy_fork(up.mount, fork, source, quota_bytes=quota_bytes)
        if layer is not None and layer not in up.layers:
            raise UsageError(
                f"volume {name!r} has no layer {layer}",
                hint=f"there are: {', '.join(up.layers)}",
            )
        below = up.mount / LAYERS_DIRECTORY / (layer or up.layers[-1])
        return make_fork(up.mount, fork, below, mode=mode, quota_bytes=quota_bytes)


def ensure_fork(
    name: str, fork: str, *, base: os.PathLike[str] | str | None = None
) -> Path:
    """Return the path of a fork of an image's volume that is up. It is made as by
    fork_image(), if there is none of that name. Raises what fork_image() raises."""
    with up_with_image(name, base) as up:
        if (there := look_up_fork(up.mount, fork)) is not None:
            return there.path
        return make_fork(up.mount, fork, up.mount / LAYERS_DIRECTORY / up.layers[-1])


def forks_of_image(
    name: str, *, base: os.PathLike[str] | str | None = None
) -> list[Fork]:
    """Return the forks of an image's volume that is up. Raises UsageError."""
    with up_with_image(name, base) as up:
        return list_forks(up.mount)


def unfork_image(
    name: str, fork: str, *, base: os.PathLike[str] | str | None = None
) -> None:
    """Remove a fork of an image's volume that is up, with what was written to it.
    Raises UsageError when there is none of that name, LeftoverError while it is in use.
    """
    with up_with_image(name, base) as up:
        remove_fork(up.mount, fork)
