"""What an image is made of: a directory, a tar, or the layers of an ordinary image."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from btrfs_ublk.content.platforms import (
    Platform,
    machine_platform,
    platform_of,
    wanted_platforms,
)
from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.documents import (
    ARTIFACT,
    NO_BYTES,
    Descriptor,
    InvalidImageError,
    blobs_of,
    choose_platform,
    descriptors,
    is_index,
    manifests_of,
    parse_document,
    platform_in,
)
from btrfs_ublk.image.layout import Layout, blob_name
from btrfs_ublk.image.pack import next_chain_id
from btrfs_ublk.image.reference import Name, check_digest
from btrfs_ublk.image.repository import Progress, no_progress
from btrfs_ublk.image.transfer import bring, open_image

_SEALED_HINT = (
    "name the image that it was made of; a volume takes a sealed one as it is: "
    "btrfs-ublk volume add-image"
)
_NOTHING = Path("/dev/null")


@dataclass(frozen=True, kw_only=True)
class SourceLayer:
    """A layer as mkimage is told of it. Those of images have ``name``, their chain ID,
    and may have whiteouts."""

    kind: Literal["directory", "tar"]
    path: Path
    name: str | None = None
    diff_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        keys = vars(self) | {"path": str(self.path), "whiteouts": self.name is not None}
        return {key: value for key, value in keys.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class OpenedSource:
    """``ordinary`` is the image whose layers these are, and ``manifest`` its document;
    None for a directory or a tar."""

    layers: tuple[SourceLayer, ...]
    config: Mapping[str, Any]
    ordinary: Descriptor | None = None
    manifest: Mapping[str, Any] | None = None


def open_source(
    source: Name | Path,
    layout: Layout,
    access: RegistryAccess,
    *,
    platform: str | None = None,
    progress: Progress = no_progress,
) -> OpenedSource:
    """Return what a source consists of. The blobs of an image are copied to ``layout``
    before, verified. Raises UsageError, RegistryError, InvalidImageError."""
    if isinstance(source, Path):
        return open_path(source)
    where = str(source)
    with open_image(source, access) as (place, one, data):
        was_chosen = is_index(document := parse_document(data, where))
        about = one
        if was_chosen:
            about = _choose(document, platform, where, place.read)
            data = place.read(about)
            document = parse_document(data, where)
        _check_ordinary(document, where, place.has)
        for blob in blobs_of(document, about.digest):
            bring(layout, blob, place, progress)
        made = layout.add(about.media_type, data)
    wanted = wanted_platforms(platform) if was_chosen else None
    return _open_image(layout, _with_platform(made, about.raw), where, wanted)


def open_path(path: Path) -> OpenedSource:
    """Return what a directory or a tar consists of."""
    machine = machine_platform()
    kind: Literal["directory", "tar"] = "directory" if path.is_dir() else "tar"
    return OpenedSource(
        layers=(SourceLayer(kind=kind, path=path),),
        config={"architecture": machine.architecture, "os": machine.os},
    )


def _choose(
    index: Mapping[str, Any],
    platform: str | None,
    where: str,
    read: Callable[[Descriptor], bytes],
) -> Descriptor:
    manifests = manifests_of(index, where, read)
    if manifests and all(each.is_sealed for each in manifests):
        raise UsageError(f"{where} is sealed only", hint=_SEALED_HINT)
    return choose_platform(manifests, platform, where)


def _check_ordinary(
    document: Mapping[str, Any], where: str, has: Callable[[Descriptor], bool]
) -> None:
    """Raise before anything large is fetched; ``has`` says whether a blob is there."""
    if document.get("artifactType") == ARTIFACT:
        raise UsageError(f"{where} is a sealed image already", hint=_SEALED_HINT)
    for layer in descriptors(document, "layers", where):
        what = f"{where} has a layer of the type {layer.media_type!r}"
        if layer.media_type.endswith("+encrypted"):
            raise UsageError(
                f"{what}: it is encrypted",
                hint="decrypt the image before: skopeo copy --decryption-key KEY …",
            )
        if layer.codec is None:
            raise UsageError(f"{what}, no tar", hint="it is no image of a file system")
        if layer.is_foreign and not has(layer):
            urls = layer.raw.get("urls")
            places = ", ".join(map(str, urls if isinstance(urls, list) else []))
            raise UsageError(
                f"{what}: {layer.digest} is foreign, and not beside the image; its "
                f"manifest says that it is at {places or 'no place'}",
                hint="put it into an image layout of the image, by the name "
                f"{blob_name(layer.digest)}, and name that: oci:DIRECTORY",
            )


def _with_platform(one: Descriptor, about: Mapping[str, Any]) -> Descriptor:
    kept = {key: about[key] for key in ("platform",) if key in about}
    return Descriptor(one.media_type, one.digest, one.size, {**one.raw, **kept})


def _open_image(
    layout: Layout,
    manifest: Descriptor,
    where: str,
    wanted: Sequence[Platform] | None,
) -> OpenedSource:
    document = parse_document(layout.read(manifest), where)
    config_blob, *layers = blobs_of(document, where)
    config, diff_ids = read_config(layout.read(config_blob), where)
    if len(diff_ids) != len(layers):
        raise InvalidImageError(
            f"{where} has {len(layers)} layers, and its config tells of "
            f"{len(diff_ids)}"
        )
    if not manifest.platform and "architecture" in config:
        found = platform_of(config)
        if wanted is not None and found not in wanted:
            raise UsageError(
                f"{where} has no image for {wanted[0]}",
                hint=f"choose with --platform; there is: {found}",
            )
        manifest = _with_platform(manifest, {"platform": platform_in(config)})
    made = []
    chain_id: str | None = None
    for layer, diff_id in zip(layers, diff_ids, strict=True):
        chain_id = next_chain_id(chain_id, diff_id)
        path = layout.check(layer)
        made.append(SourceLayer(kind="tar", path=path, name=chain_id, diff_id=diff_id))
    if not made:
        made = [SourceLayer(kind="tar", path=_NOTHING, name=NO_BYTES, diff_id=NO_BYTES)]
    return OpenedSource(
        layers=tuple(made), config=config, ordinary=manifest, manifest=document
    )


def read_config(data: bytes, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the config of an image, and the digests of its uncompressed layers. Raises
    InvalidImageError."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidImageError(f"the config of {where} is not JSON") from error
    match config:
        case {"rootfs": {"diff_ids": [*found]}}:
            try:
                return config, [check_digest(each, what="diff ID") for each in found]
            except UsageError as error:
                raise InvalidImageError(
                    f"the config of {where}: {error.message}"
                ) from error
        case {"rootfs": {"diff_ids": None}}:  # as Go writes an empty list
            return config, []
    raise InvalidImageError(f"the config of {where} has no diff IDs of layers")
