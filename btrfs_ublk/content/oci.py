"""Find the blob that a tag of a container registry names now.

A source is one blob, which never changes, so mappings need its digest. The server,
which has the logins, looks a tag up; this module interprets the reply (OCI image
specification 1.1, image-index.md and manifest.md, and Docker's older formats).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import format_size

#: What a tag, or a digest, of a mirror's repository is: an index, or a manifest.
LookUp = Callable[[dict[str, Any], str], dict[str, Any]]

#: Gets an image by its tag, and the digest of the blob that it names.
Resolved = Callable[[str, str], object]


def parse_image(text: str) -> dict[str, Any] | None:
    """Parse REGISTRY/REPOSITORY[:TAG][@DIGEST] into a mirror; None if it is no such
    name."""
    name, _, digest = text.partition("@")
    registry, _, repository = name.partition("/")
    repository, _, tag = repository.partition(":")
    if not registry or not repository or not (tag or digest):
        return None
    mirror = {"kind": "oci", "registry": registry, "repository": repository}
    more = {"tag": tag, "digest": digest}
    return mirror | {key: value for key, value in more.items() if value}


def is_tag(mirror: dict[str, Any]) -> bool:
    """Whether the mirror has no digest yet."""
    return mirror.get("kind") == "oci" and "tag" in mirror and "digest" not in mirror


def has_tag(source: dict[str, Any]) -> bool:
    """Whether a mirror of the source has no digest yet."""
    mirrors = source.get("mirrors")
    if not isinstance(mirrors, list):
        return is_tag(source)
    return any(isinstance(mirror, dict) and is_tag(mirror) for mirror in mirrors)


def _image_name(mirror: dict[str, Any]) -> str:
    return f"{mirror.get('registry')}/{mirror.get('repository')}:{mirror['tag']}"


def resolve_tags(
    source: dict[str, Any], look_up: LookUp, resolved: Resolved | None
) -> dict[str, Any]:
    """Return a source whose mirrors have digests; see MapClient.resolve()."""
    if not has_tag(source):
        return source
    size_bytes = source.get("size")

    def pinned(mirror: dict[str, Any]) -> dict[str, Any]:
        nonlocal size_bytes
        if not is_tag(mirror):
            return mirror
        digest, found_bytes = _resolve(mirror, look_up)
        if size_bytes not in (None, found_bytes):
            raise UsageError(
                f"{_image_name(mirror)} has {found_bytes} bytes ({digest}), and the "
                f"source has {size_bytes}",
                hint="leave the size out; mirrors have the same content",
            )
        size_bytes = found_bytes
        if resolved is not None:
            resolved(_image_name(mirror), digest)
        return mirror | {"digest": digest}

    made = _with_each_mirror(source, pinned)
    return made if size_bytes is None else made | {"size": size_bytes}


def without_tags(source: dict[str, Any]) -> dict[str, Any]:
    """Return the mirror as a server accepts it, without a tag, since the digest
    suffices."""

    def without(mirror: dict[str, Any]) -> dict[str, Any]:
        if mirror.get("kind") != "oci":
            return mirror
        return {key: value for key, value in mirror.items() if key != "tag"}

    return _with_each_mirror(source, without)


def _with_each_mirror(
    source: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    mirrors = source.get("mirrors")
    if not isinstance(mirrors, list):
        return change(source)
    made = [change(one) if isinstance(one, dict) else one for one in mirrors]
    return source | {"mirrors": made}


def _resolve(mirror: dict[str, Any], look_up: LookUp) -> tuple[str, int]:
    """Return digest and size of the blob that the mirror's tag names."""
    name = _image_name(mirror)
    # Keys of the source are not keys of a mirror.
    less = ("tag", "size", "unit", "digests", "root")
    place = {key: value for key, value in mirror.items() if key not in less}
    found = look_up(place, mirror["tag"])
    if "manifests" in found:
        found = look_up(place, _choose(found["manifests"], name))
    match found:
        case {"layers": [{"digest": str(digest), "size": int(size)}]}:
            return digest, size
        case {"layers": [_, *_] as layers}:
            listed = "".join(f"\n  {_layer_text(layer)}" for layer in layers)
            raise UsageError(
                f"{name} is an image of {len(layers)} layers, and a source is one blob:"
                f"{listed}",
                hint=f"name one of them: {name.rpartition(':')[0]}@sha256:…",
            )
    raise BtrfsUblkError(
        f"{name} is no image with layers (mediaType {found.get('mediaType')!r})",
        hint="name a blob by its digest: REGISTRY/REPOSITORY@sha256:…",
    )


def _layer_text(layer: object) -> str:
    match layer:
        case {"digest": digest, "size": int(size)}:
            return f"{digest}  {format_size(size)}"
    return repr(layer)


def _choose(manifests: object, name: str) -> str:
    """Return the digest of the manifest for this machine's platform."""
    from btrfs_ublk.content.platforms import (
        best_platform,
        is_attestation,
        is_unknown,
        platform_of,
        wanted_platforms,
    )

    wanted = wanted_platforms(None)
    there: list[tuple[Mapping[str, Any], str]] = []
    for one in manifests if isinstance(manifests, list) else []:
        match one:
            case {"digest": str(digest), "platform": dict(about)} if (
                about and not is_unknown(about) and not is_attestation(one)
            ):
                there.append((about, digest))
    found = best_platform(there, wanted)
    if found is not None:
        return found
    listed = ", ".join(str(platform_of(about)) for about, _ in there) or "none"
    raise UsageError(
        f"{name} has no image for {wanted[0]}, this machine's platform",
        hint=f"there are: {listed}; a blob of another one has to be named by its "
        "digest: REGISTRY/REPOSITORY@sha256:…",
    )
