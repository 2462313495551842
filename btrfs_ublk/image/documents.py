"""Documents of images: indexes and manifests (OCI image specification 1.1).

They come from others, so each value is checked before it is used. Those that are passed
on keep their bytes, as their digests name them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

from btrfs_ublk.base.records import dataclass
from btrfs_ublk.content.platforms import (
    best_platform,
    is_attestation,
    is_unknown,
    platform_of,
    wanted_platforms,
)
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.reference import check_digest

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
CONFIGS = (CONFIG, "application/vnd.docker.container.image.v1+json")
_DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES = (INDEX, _DOCKER_INDEX)
MANIFESTS = (MANIFEST, _DOCKER_MANIFEST)
EMPTY = "application/vnd.oci.empty.v1+json"
EMPTY_BYTES = b"{}"

ARTIFACT = "application/vnd.btrfs-ublk.image.v1"
#: Of an image whose data stay in the layers of another one, its subject.
INDEXED = "application/vnd.btrfs-ublk.index.v1"
#: Of what a start of an image has read, its subject, and the annotation that says it.
TRACED = "application/vnd.btrfs-ublk.trace.v1"
TRACE = "vnd.btrfs-ublk.trace"
#: Annotation of an indexed image's manifest: what its start reads, in the same form.
FIRST = "vnd.btrfs-ublk.first"
METADATA = "application/vnd.btrfs-ublk.metadata.v1+zstd"
DATA = "application/vnd.btrfs-ublk.data.v1"
#: Annotation of a layer: the digest of the manifest of the sealed image that has it.
SEALED_IN = "containerd.io/snapshot/btrfs-ublk.image"
#: Annotation of an index in a layout: its tag.
TAG = "org.opencontainers.image.ref.name"
#: Annotation of a sealed image's manifest: its Start.
START = "vnd.btrfs-ublk.start"
#: Annotation: when something was made.
CREATED = "org.opencontainers.image.created"
#: The diff ID of a layer of no bytes. As containerd starts an image without layers from
#: an empty directory, such an image is taken for one with a layer of nothing.
NO_BYTES = f"sha256:{hashlib.sha256().hexdigest()}"
#: Of blocks, as btrfs has them.
CHECKSUMS = ("crc32c", "xxhash64", "sha256", "blake2b")
#: Of layers that are made here.
Compression = Literal["gzip", "zstd"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
#: Platform of what is no image for a machine.
NO_PLATFORM = {"os": "unknown", "architecture": "unknown"}

#: Where the data object begins on the device, behind the last superblock mirror.
DATA_OFFSET = 512 << 30
_BLOCK_BYTES, _MAX_DEVICE_BYTES = 4096, 4 << 60
_UNITS = [1 << each for each in range(12, 21)]
_FSID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: Registries accept no larger manifests (OCI distribution specification, 1.1).
MAX_DOCUMENT_BYTES = 4 << 20
_MAX_BLOB_BYTES = 1 << 50
#: The largest manifest that its descriptor embeds, and the most bytes of digests that a
#: manifest has: more would take longer than the request that they save.
_MAX_EMBEDDED_BYTES = 64 << 10
_MAX_START_BYTES = 256 << 10
#: Of the metadata of an image, packed or not.
MAX_METADATA_BYTES = 16 << 30
#: More layers than overlayfs, Docker and containerd can have.
MAX_LAYERS = 1000
#: Indexes within an index.
_MAX_INDEXES = 32
#: Media types of layers. Foreign ones need not be in registries, as their licence may
#: forbid it.
_LAYER = re.compile(
    r"application/vnd\."
    r"(?:oci\.image\.layer(?P<oci>\.nondistributable)?\.v1\.tar(?:\+(?P<o>gzip|zstd))?"
    r"|docker\.image\.rootfs(?P<docker>\.foreign)?\.diff\.tar(?:\.(?P<d>gzip|zstd))?)"
)


def created_s(one: Descriptor) -> float:
    """Return when something was made, by what its descriptor says."""
    try:
        return datetime.fromisoformat(str(one.annotations[CREATED])).timestamp()
    except (KeyError, ValueError, OverflowError):
        return -inf


class InvalidImageError(BtrfsUblkError):
    """A document of an image is not as it must be. The message says where."""


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


@dataclass(frozen=True)
class Descriptor:
    """What names a blob or a document. ``raw`` is all of it, as it was written."""

    media_type: str
    digest: str
    size: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def platform(self) -> Mapping[str, Any]:
        found = self.raw.get("platform")
        return found if isinstance(found, dict) else {}

    @property
    def annotations(self) -> Mapping[str, Any]:
        found = self.raw.get("annotations")
        return found if isinstance(found, dict) else {}

    @property
    def is_sealed(self) -> bool:
        """Whether it names the manifest of a sealed image."""
        return self.raw.get("artifactType") == ARTIFACT

    @property
    def is_document(self) -> bool:
        return self.media_type in INDEXES + MANIFESTS

    @property
    def codec(self) -> str | None:
        """How a layer is compressed; "" for a tar as it is, None for no layer."""
        found = _LAYER.fullmatch(self.media_type)
        return None if found is None else found["o"] or found["d"] or ""

    @property
    def is_foreign(self) -> bool:
        found = _LAYER.fullmatch(self.media_type)
        return bool(found and (found["oci"] or found["docker"]))


def describe(media_type: str, data: bytes, **more: Any) -> Descriptor:
    """Describe a document or blob that is in memory."""
    return describe_blob(media_type, digest_of(data), len(data), **more)


def describe_blob(media_type: str, digest: str, size: int, **more: Any) -> Descriptor:
    """Describe a blob. ``more`` are further keys of the descriptor."""
    raw = {"mediaType": media_type, "digest": digest, "size": size, **more}
    return Descriptor(media_type, digest, size, raw)


def embedding(one: Descriptor, data: bytes) -> Mapping[str, Any]:
    """Return the descriptor of a document, with the document in it unless that is
    large (OCI image specification, descriptor.md: ``data``)."""
    if len(data) > _MAX_EMBEDDED_BYTES:
        return one.raw
    return {**one.raw, "data": base64.b64encode(data).decode()}


def embedded(one: Descriptor) -> bytes | None:
    """Return the document that a descriptor embeds, verified; None: it has none."""
    text = one.raw.get("data")
    if not isinstance(text, str) or len(text) > MAX_DOCUMENT_BYTES:
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return data if digest_of(data) == one.digest else None


def parse_descriptor(value: Any, where: str) -> Descriptor:
    """Raises InvalidImageError, which names the place as ``where``."""
    match value:
        case {"mediaType": str(media_type), "digest": digest, "size": int(size)} if (
            not isinstance(size, bool) and 0 <= size <= _MAX_BLOB_BYTES
        ):
            try:
                check_digest(digest)
            except UsageError as error:
                raise InvalidImageError(f"{where}: {error.message}") from error
            if not isinstance(value.get("annotations") or {}, dict):
                raise InvalidImageError(f"{where} has annotations that are no object")
            return Descriptor(media_type, digest, size, value)
    raise InvalidImageError(f"{where} is no descriptor: {str(value)[:200]!r}")


def parse_document(data: bytes, where: str) -> dict[str, Any]:
    """Parse an index or a manifest. Raises InvalidImageError."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise InvalidImageError(
            f"{where} has more than {MAX_DOCUMENT_BYTES} bytes, which a document of an "
            "image may not have"
        )
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidImageError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schemaVersion") != 2:
        raise InvalidImageError(
            f"{where} is neither an index nor a manifest of version 2"
        )
    return found


def is_index(document: Mapping[str, Any]) -> bool:
    return "manifests" in document


def descriptors(document: Mapping[str, Any], key: str, where: str) -> list[Descriptor]:
    """Return those of the list ``key``; Go writes an empty one as null. Raises
    InvalidImageError."""
    found = document.get(key)
    if found is None and key in document:
        return []
    if not isinstance(found, list) or len(found) > MAX_LAYERS:
        raise InvalidImageError(f"{where} has no list of {key} (of {MAX_LAYERS} most)")
    return [
        parse_descriptor(each, f"{key}[{number}] of {where}")
        for number, each in enumerate(found)
    ]


def manifests_of(
    index: Mapping[str, Any], where: str, read: Callable[[Descriptor], bytes]
) -> list[Descriptor]:
    """Return the manifests of an index and of the indexes within it, which ``read``
    reads, verified; those within have their index's platform if they say none. Raises
    InvalidImageError."""
    found, seen = [], 0
    pending: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [(index, {})]
    while pending:
        document, platform = pending.pop(0)
        for one in descriptors(document, "manifests", where):
            if platform and not one.platform:
                one = replace(one, raw={**one.raw, "platform": platform})
            if one.media_type not in INDEXES:
                found.append(one)
                continue
            seen += 1
            if seen > _MAX_INDEXES:
                raise InvalidImageError(
                    f"{where} has more than {_MAX_INDEXES} indexes within it"
                )
            pending.append((parse_document(read(one), one.digest), one.platform))
    return found


def blobs_of(document: Mapping[str, Any], where: str) -> Iterator[Descriptor]:
    """Yield what a manifest consists of: its config, and its layers. Raises
    InvalidImageError."""
    yield parse_descriptor(document.get("config"), f"the config of {where}")
    yield from descriptors(document, "layers", where)


def sealed_in(manifest: Mapping[str, Any]) -> set[str]:
    """Return the digests of the sealed images that have the layers of an ordinary one,
    as these say."""
    if "layers" not in manifest:
        return set()
    layers = descriptors(manifest, "layers", "a manifest")
    return {str(x.annotations[SEALED_IN]) for x in layers if SEALED_IN in x.annotations}


def may_be_sealed(manifests: list[Descriptor]) -> list[Descriptor]:
    """Return those manifests of an index that may be of a sealed image, likely ones
    first. NB: skopeo drops artifactType from an index that it copies."""
    return [each for each in manifests if each.is_sealed] or [
        each
        for each in manifests
        if each.media_type == MANIFEST
        and NO_PLATFORM.items() <= dict(each.platform).items()
        and not is_attestation(each.raw)
    ]


def ordinary_images(manifests: list[Descriptor]) -> list[Descriptor]:
    """Return those manifests of an index that are of ordinary images: neither sealed
    ones, nor what says something of an image, nor other artifacts."""
    return [
        each
        for each in manifests
        if each.raw.get("artifactType") in (None, "", *CONFIGS)
        and not is_unknown(each.platform)
        and not is_attestation(each.raw)
    ]


def choose_platform(
    manifests: list[Descriptor], platform: str | None, where: str
) -> Descriptor:
    """Return the ordinary image for OS/ARCHITECTURE[/VARIANT] that containerd would
    take; None: for this machine. Raises UsageError, which says which there are.
    """
    wanted = wanted_platforms(platform)
    images = ordinary_images(manifests)
    found = best_platform([(each.platform, each) for each in images], wanted)
    if found is not None:
        return found
    there = [str(platform_of(each.platform)) for each in images]
    raise UsageError(
        f"{where} has no image for {wanted[0]}",
        hint=f"choose with --platform; there are: {', '.join(there) or 'none'}",
    )


def to_bytes(document: Mapping[str, Any]) -> bytes:
    """Write a document of ours: the same each time."""
    return json.dumps(document, indent=1).encode()


def write_index(manifests: Iterable[Mapping[str, Any]]) -> bytes:
    """Return an index of descriptors."""
    listed = [dict(each) for each in manifests]
    return to_bytes({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed})


def parse_index(data: bytes, where: str) -> list[Descriptor]:
    """Return what an index lists. Raises InvalidImageError."""
    return descriptors(parse_document(data, where), "manifests", where)


def tagged(index: Iterable[Descriptor], tag: str) -> Descriptor | None:
    """Return what has a name in the index of a layout."""
    return next((one for one in index if one.annotations.get(TAG) == tag), None)


def retagged(index: Iterable[Descriptor], one: Descriptor | None, tag: str) -> bytes:
    """Return the index of a layout in which only ``one``, if any, has a name."""
    manifests = [each.raw for each in index if each.annotations.get(TAG) != tag]
    if one is not None:
        annotations = {**one.annotations, TAG: tag}
        manifests.append({**one.raw, "annotations": annotations})
    return write_index(manifests)


def platform_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the config of an image says of its platform, as descriptors do."""
    keys = ("os", "architecture", "variant")
    return {key: config[key] for key in keys if key in config}


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a device and its map need of an image while its pack is on the way, whose
    header has the same. ``digests`` are those of all units."""

    local_bytes: int
    device_bytes: int
    data_bytes: int
    first_bytes: int
    unit: int
    fsid: str
    digests: bytes

    def to_annotations(self) -> dict[str, str]:
        """What the manifest has of it: nothing where it would be too long."""
        if len(self.digests) > _MAX_START_BYTES:
            return {}
        keys = vars(self) | {"digests": base64.b64encode(self.digests).decode()}
        return {START: json.dumps(keys, separators=(",", ":"))}

    @classmethod
    def parse(cls, text: str) -> Start | None:
        """Return what an annotation says; None where it has another form, as one of a
        later version: the pack says all."""
        try:
            keys = json.loads(text)
            keys["digests"] = base64.b64decode(keys["digests"], validate=True)
            found = cls(**keys)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return found if found._is_valid() else None

    def _is_valid(self) -> bool:
        sizes = (self.local_bytes, self.data_bytes, self.first_bytes, self.device_bytes)
        return (
            all(type(x) is int and x >= 0 and not x % _BLOCK_BYTES for x in sizes)
            and 0 < self.local_bytes <= DATA_OFFSET
            and 0 < self.data_bytes <= self.device_bytes - DATA_OFFSET
            and self.device_bytes <= _MAX_DEVICE_BYTES
            and self.first_bytes <= self.data_bytes
            and type(self.unit) is int
            and self.unit in _UNITS
            and len(self.digests) == -(-self.data_bytes // self.unit) * 32
            and isinstance(self.fsid, str)
            and _FSID.fullmatch(self.fsid) is not None
        )


@dataclass(frozen=True)
class SealedManifest:
    """The manifest of a sealed image: metadata pack and data object. All content of an
    image without ``data`` is in its metadata, or in the layers of its ``subject``: then
    it is an indexed image."""

    digest: str
    pack: Descriptor
    data: Descriptor | None
    subject: Descriptor | None = None
    start: Start | None = None
    #: Whether what comes first was traced, so that a referrer knows no better.
    traced: bool = False
    #: As a trace has it (image/traces.py): what comes first of an indexed image.
    first: object = None

    @property
    def data_bytes(self) -> int:
        return self.data.size if self.data else 0


def write_sealed_manifest(
    pack: Descriptor,
    data: Descriptor | None,
    subject: Descriptor | None = None,
    *,
    annotations: Mapping[str, str] | None = None,
) -> bytes:
    """Return the manifest of a sealed image, or of an indexed one of ``subject``."""
    blobs = [pack] if data is None else [pack, data]
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": ARTIFACT if subject is None else INDEXED,
        "config": dict(describe(EMPTY, EMPTY_BYTES).raw),
        "layers": [dict(each.raw) for each in blobs],
    }
    if subject is not None:
        keys = ("mediaType", "digest", "size")
        document["subject"] = {key: subject.raw[key] for key in keys}
    if annotations:
        document["annotations"] = dict(annotations)
    return to_bytes(document)


def parse_sealed_manifest(data: bytes, where: str) -> SealedManifest:
    """Raises InvalidImageError for what is no manifest of a sealed image."""
    document = parse_document(data, where)
    subject = None
    if document.get("artifactType") == INDEXED:
        subject = parse_descriptor(document.get("subject"), f"the subject of {where}")
    elif document.get("artifactType") != ARTIFACT:
        raise InvalidImageError(
            f"{where} is no sealed image: its artifactType is "
            f"{document.get('artifactType')!r}, not {ARTIFACT!r}",
            hint="make one of it: btrfs-ublk image build",
        )
    found: dict[str, Descriptor] = {}
    for layer in descriptors(document, "layers", where):
        if layer.media_type in (METADATA, DATA):
            if layer.media_type in found:
                raise InvalidImageError(f"{where} has two blobs {layer.media_type}")
            found[layer.media_type] = layer
    if METADATA not in found:
        raise InvalidImageError(f"{where} has no blob {METADATA}")
    if found[METADATA].size > MAX_METADATA_BYTES:
        raise InvalidImageError(
            f"{where} has a metadata pack of {found[METADATA].size} bytes, more than "
            f"{MAX_METADATA_BYTES}"
        )
    if subject is not None and DATA in found:
        raise InvalidImageError(f"{where} is an indexed image with data of its own")
    annotations = document.get("annotations")
    if not isinstance(annotations, dict):
        annotations = {}
    text = annotations.get(START)
    return SealedManifest(
        digest_of(data),
        found[METADATA],
        found.get(DATA),
        subject,
        Start.parse(text) if isinstance(text, str) and DATA in found else None,
        TRACE in annotations,
        annotations.get(FIRST),
    )
