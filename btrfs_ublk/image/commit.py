"""Ordinary images with one more layer: what a fork has changed (docs/design/images.md).

The layers below stay as they are, and are copied only to where they are missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any
from zlib import MAX_WBITS, compressobj

import zstandard

from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import source_date_epoch
from btrfs_ublk.image.documents import (
    INDEXED,
    MANIFESTS,
    NO_BYTES,
    Compression,
    Descriptor,
    InvalidImageError,
    blobs_of,
    is_index,
    manifests_of,
    parse_document,
    parse_sealed_manifest,
    platform_in,
    to_bytes,
)
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import next_chain_id
from btrfs_ublk.image.reference import DEFAULT_TAG, LayoutName, Name, Reference
from btrfs_ublk.image.repository import Repository
from btrfs_ublk.image.source import read_config
from btrfs_ublk.image.transfer import bring, open_image, open_place, open_repository
from btrfs_ublk.kernel.temporary import tempdir

_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+"
_DOCKER = "application/vnd.docker."
_DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar."
_GZIP_LEVEL = 6
_ZSTD_LEVEL = 9
#: zlib writes gzip's header, without a time.
_GZIP_BITS = 16 + MAX_WBITS


@dataclass(frozen=True)
class BaseImage:
    """An ordinary image whose first layers become those of another one."""

    name: Name
    media_type: str
    document: bytes  # its manifest
    config: Mapping[str, Any]
    config_data: bytes
    config_type: str
    diff_ids: tuple[str, ...]
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, kw_only=True)
class CommittedImage:
    """An image that was made: its name, the digest of its manifest, that of its new
    layer, and how large the layer is. ``sent_bytes`` went to a registry."""

    name: str
    digest: str
    layer: str
    layer_bytes: int
    sent_bytes: int = 0


def find_base(
    name: Name, access: RegistryAccess, chain_ids: Sequence[str]
) -> BaseImage:
    """Return the ordinary image of a name whose layers begin with those of these chain
    IDs. Raises UsageError when there is none, RegistryError, InvalidImageError."""
    with open_image(name, access) as (place, one, data):
        found = _find(name, chain_ids, one.media_type, data, place.read)
    if found is None:
        raise UsageError(
            f"{name} has no ordinary image with the layers that this volume is of",
            hint="does the tag name another image now? An image that was built of a "
            "directory or a tar has no layers: write a delta (--delta FILE), or build "
            "an image of the fork's directory (image build)",
        )
    return found


def _find(
    name: Name,
    chain_ids: Sequence[str],
    media_type: str,
    data: bytes,
    read: Callable[[Descriptor], bytes],
) -> BaseImage | None:
    document = parse_document(data, str(name))
    if is_index(document):
        for one in manifests_of(document, str(name), read):
            if one.media_type in MANIFESTS and not one.is_sealed:
                found = _find(name, chain_ids, one.media_type, read(one), read)
                if found is not None:
                    return found
        return None
    if document.get("artifactType") == INDEXED:
        subject = parse_sealed_manifest(data, str(name)).subject
        assert subject is not None
        try:
            below = read(subject)
        except InvalidImageError as error:
            raise UsageError(
                f"{name} is an index, and the image that it is of is not beside it",
                hint="push the index to that image (image push), bring that up, and "
                "commit a fork of it",
            ) from error
        return _find(name, chain_ids, subject.media_type, below, read)
    # What is no image for a machine, as an attestation, has another config.
    with suppress(InvalidImageError):
        config_blob, *layers = blobs_of(document, str(name))
        config_data = read(config_blob)
        config, diff_ids = read_config(config_data, str(name))
        chain: list[str] = []
        for diff_id in diff_ids[: len(chain_ids)]:
            chain.append(next_chain_id(chain[-1] if chain else None, diff_id))
        count = len(chain)
        if (chain or [NO_BYTES]) == list(chain_ids) and len(layers) == len(diff_ids):
            return BaseImage(
                name=name,
                media_type=media_type,
                document=data,
                config=config,
                config_data=config_data,
                config_type=config_blob.media_type,
                diff_ids=tuple(diff_ids[:count]),
                layers=tuple(layers[:count]),
            )
    return None


def commit_image(
    base: BaseImage,
    write: Callable[[IO[bytes]], object],
    target: Name,
    access: RegistryAccess,
    *,
    base_access: RegistryAccess | None = None,
    compression: Compression = "gzip",
    say: Callable[[str], object] = lambda text: None,
) -> CommittedImage:
    """Make the image that has the layers of ``base``, and one more, whose tar ``write``
    writes. ``target`` is in a layout, which is made if missing, or in a registry, where
    layers that are there are not sent.

    Raises UsageError, RegistryError, InvalidImageError, BtrfsUblkError; no name is
    given to what is not complete.
    """
    base_access = base_access or access
    with ExitStack() as stack:
        if isinstance(target, LayoutName):
            layout = Layout.made(target.path)
            stack.callback(layout.remove_if_empty)
        else:
            layout = Layout.made(stack.enter_context(tempdir()) / "layout")
        say("write the layer")
        layer, diff_id = _add_layer(layout, base, write, compression)
        manifest, config = _add_documents(layout, base, layer, diff_id)
        sent_bytes = 0
        if isinstance(target, LayoutName):
            say("copy the layers below")
            _copy(base, base_access, layout, base.layers)
            tag = target.tag or DEFAULT_TAG
            layout.tag(manifest, tag)
            name = str(LayoutName(target.path, tag))
        else:
            say("push")
            with open_repository(target, access, writing=True) as repository:
                missing = _mount_below(base, target, repository)
                _copy(base, base_access, layout, missing)
                for one in (*missing, layer, config):
                    if not repository.has(one):
                        repository.upload(one, layout.check(one))
                        sent_bytes += one.size
                version = target.tag or manifest.digest
                data = layout.read(manifest)
                repository.put_document(version, manifest.media_type, data)
            name = f"{target.place}@{manifest.digest}"
        return CommittedImage(
            name=name,
            digest=manifest.digest,
            layer=layer.digest,
            layer_bytes=layer.size,
            sent_bytes=sent_bytes,
        )


class CompressedLayer:
    """A file to write a layer to, which is compressed; ``diff_id`` is known of what was
    written."""

    def __init__(self, out: IO[bytes], compression: Compression) -> None:
        self._out = out
        self._found = hashlib.sha256()
        self._compressor: Any = (
            compressobj(_GZIP_LEVEL, wbits=_GZIP_BITS)
            if compression == "gzip"
            else zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj()
        )

    @property
    def diff_id(self) -> str:
        return f"sha256:{self._found.hexdigest()}"

    def write(self, data: bytes) -> int:
        self._found.update(data)
        self._out.write(self._compressor.compress(data))
        return len(data)

    def finish(self) -> None:
        self._out.write(self._compressor.flush())


def _add_layer(
    layout: Layout,
    base: BaseImage,
    write: Callable[[IO[bytes]], object],
    compression: Compression,
) -> tuple[Descriptor, str]:
    is_docker = base.media_type.startswith(_DOCKER)
    media_type = (_DOCKER_LAYER if is_docker else _OCI_LAYER) + compression
    with layout.adding(media_type) as (file, done):
        compressed = CompressedLayer(file, compression)
        write(compressed)  # type: ignore[arg-type]  # it has what is needed
        compressed.finish()
    return done[0], compressed.diff_id


def _add_documents(
    layout: Layout, base: BaseImage, layer: Descriptor, diff_id: str
) -> tuple[Descriptor, Descriptor]:
    """Add manifest and config; return both."""
    config: dict[str, Any] = dict(base.config)
    config["rootfs"] = {"type": "layers", "diff_ids": [*base.diff_ids, diff_id]}
    entry = {"created_by": "btrfs-ublk image commit"}
    if (epoch := source_date_epoch()) is not None:
        entry["created"] = config["created"] = (
            datetime.fromtimestamp(epoch, UTC).isoformat().replace("+00:00", "Z")
        )
    if history := config.get("history"):
        # Clients compare its length with the number of layers.
        config["history"] = [*_history(history, len(base.layers)), entry]
    config_blob = layout.add(base.config_type, to_bytes(config))
    # Where the layers are sealed is a matter of the other image.
    layers = [
        {key: value for key, value in each.raw.items() if key != "annotations"}
        for each in base.layers
    ]
    document = {
        "schemaVersion": 2,
        "mediaType": base.media_type,
        "config": dict(config_blob.raw),
        "layers": [*layers, dict(layer.raw)],
    }
    manifest = layout.add(
        base.media_type, to_bytes(document), platform=platform_in(config)
    )
    return manifest, config_blob


def _history(history: Sequence[Any], layers: int) -> list[Any]:
    """Return the part that is of the first layers."""
    found = []
    for entry in history:
        is_empty = isinstance(entry, dict) and entry.get("empty_layer")
        layers -= not is_empty
        if layers < 0:
            break
        found.append(entry)
    return found


def _copy(
    base: BaseImage,
    access: RegistryAccess,
    layout: Layout,
    blobs: Sequence[Descriptor],
) -> None:
    """Have these blobs of the base in a layout."""
    with open_place(base.name, access) as place:
        for one in blobs:
            bring(layout, one, place)


def _mount_below(
    base: BaseImage, target: Reference, repository: Repository
) -> list[Descriptor]:
    """Mount the layers below from their repository; return those that are missing."""
    other = None
    if isinstance(base.name, Reference) and base.name.registry == target.registry:
        other = base.name.repository
    return [
        one
        for one in base.layers
        if not repository.has(one)
        and not (other and repository.mount(one.digest, other))
    ]
