"""Names of images: in registries, in OCI image layouts, and what images are made of."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from btrfs_ublk.base.records import dataclass
from btrfs_ublk.content.oci import parse_image
from btrfs_ublk.errors import UsageError

#: What starts the name of an OCI image layout, as in skopeo and podman.
LAYOUT_PREFIX = "oci:"
DEFAULT_TAG = "latest"

_REGISTRY = re.compile(r"[A-Za-z0-9.-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

#: What starts the name of an image layout in a store.
_BUCKET_PREFIX, _WEB_PREFIXES = "s3://", ("https://", "http://")
_STORES = (_BUCKET_PREFIX, *_WEB_PREFIXES)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
#: Nothing that means something in a URL, or in a pattern of the policy.
_DIRECTORY = re.compile(r"[A-Za-z0-9._~$!&'()+,;=-]+(/[A-Za-z0-9._~$!&'()+,;=-]+)*")

_FORMS = "REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@DIGEST"
_STORE_FORMS = "s3://BUCKET/PREFIX:TAG or https://HOST/DIRECTORY:TAG"


def check_digest(text: object, *, what: str = "digest") -> str:
    """Return ``text`` if it is a digest that images have here. Raises UsageError."""
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise UsageError(
            f"{what} {text!r} is not sha256: and 64 hexadecimal digits",
            hint="images with digests of other algorithms cannot be used",
        )
    return text


def check_tag(text: str) -> str:
    """Return ``text`` if a tag may be so. Raises UsageError."""
    if not _TAG.fullmatch(text):
        raise UsageError(
            f"{text!r} is no tag",
            hint="a tag has up to 128 letters, digits and _.-, and begins with a "
            "letter, a digit or _",
        )
    return text


@dataclass(frozen=True)
class Reference:
    """An image in a registry, or in a layout in a store. It has a tag, or a digest, or
    both; the digest counts. Of a store, ``registry`` is s3://BUCKET or https://HOST,
    and ``repository`` the directory there."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def is_in_registry(self) -> bool:
        return not self.registry.startswith(_STORES)

    @property
    def is_in_bucket(self) -> bool:
        return self.registry.startswith(_BUCKET_PREFIX)

    @property
    def bucket(self) -> str:
        """The bucket of a layout in one."""
        return self.registry.removeprefix(_BUCKET_PREFIX)

    @property
    def version(self) -> str:
        """What the registry is asked for."""
        found = self.digest or self.tag
        assert found is not None
        return found

    @property
    def place(self) -> str:
        """Registry and repository, or the URL of a layout in a store."""
        return f"{self.registry}/{self.repository}"

    def at(self, digest: str) -> Reference:
        """Return the reference to another manifest of the repository."""
        return replace(self, tag=None, digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.place}{tag}" + (f"@{self.digest}" if self.digest else "")


def parse_reference(text: str) -> Reference:
    """Parse REGISTRY/REPOSITORY[:TAG][@DIGEST], with a tag or a digest at least, or the
    same with the URL of a layout. Raises UsageError."""
    if text.startswith(_STORES):
        return _parse_store(text)
    found = parse_image(text)
    if found is None:
        raise UsageError(
            f"{text!r} names no image of a registry",
            hint=f"{_in_full(text)}write {_FORMS}",
        )
    reference = Reference(
        found["registry"], found["repository"], found.get("tag"), found.get("digest")
    )
    if not _REGISTRY.fullmatch(reference.registry):
        raise UsageError(
            f"{text!r}: {reference.registry!r} is no registry",
            hint="it is a host, and perhaps a port: registry.example.org:5000",
        )
    if not _REPOSITORY.fullmatch(reference.repository):
        raise UsageError(
            f"{text!r}: {reference.repository!r} is no repository",
            hint="it has small letters, digits, and ._- between them, in parts that / "
            "separates",
        )
    if reference.tag is not None:
        check_tag(reference.tag)
    if reference.digest is not None:
        check_digest(reference.digest)
    return reference


def parse_repository(text: str, option: str) -> Reference:
    """Parse REGISTRY/REPOSITORY. Raises UsageError, which names the option."""
    name = text.rpartition("/")[2]
    if "/" in text and (":" in name or "@" in name):
        raise UsageError(
            f"{option} {text!r} is a version, and not a repository",
            hint="leave the tag or digest out",
        )
    try:
        return parse_reference(f"{text}:{DEFAULT_TAG}")
    except UsageError as error:
        raise UsageError(
            f"{option} {text!r} names no repository of a registry",
            hint="write REGISTRY/REPOSITORY, such as registry.example.org/team/app; "
            "Docker's are docker.io/library/NAME",
        ) from error


def _in_full(text: str) -> str:
    """The start of a hint: the name in full, where Docker would take a short one."""
    name, at, digest = text.partition("@")
    first, slash, rest = name.partition("/")
    if slash and (first == "localhost" or set(".:") & set(first)):  # a registry
        no_version = _REPOSITORY.fullmatch(rest) and not at
        return f"write {text}:{DEFAULT_TAG}; else " if no_version else ""
    name, colon, tag = name.partition(":")
    if at:
        version, right = f"@{digest}", _DIGEST.fullmatch(digest)
    else:
        tag = tag if colon else DEFAULT_TAG
        version, right = f":{tag}", _TAG.fullmatch(tag)
    if not right or not _REPOSITORY.fullmatch(name) or name == "localhost":
        return ""
    if not slash:
        name = f"library/{name}"
    return f"for Docker's {text}, write docker.io/{name}{version}; else "


def _parse_store(text: str) -> Reference:
    url, at, digest = text.partition("@")
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    path, colon, tag = path.partition(":")
    if not slash or not path or (not colon and not at):
        raise UsageError(f"{text!r} names no image", hint=f"write {_STORE_FORMS}")
    allowed = _BUCKET if scheme == "s3" else _REGISTRY
    if not allowed.fullmatch(host):
        what = "bucket" if scheme == "s3" else "host"
        raise UsageError(f"{text!r}: {host!r} is no {what}")
    if not _DIRECTORY.fullmatch(path) or not {".", ".."}.isdisjoint(path.split("/")):
        raise UsageError(
            f"{text!r}: {path!r} cannot be the directory of a layout",
            hint="it has letters, digits, and ._~$!&'()+,;=- in parts that / separates",
        )
    return Reference(
        f"{scheme}://{host}",
        path,
        check_tag(tag) if colon else None,
        check_digest(digest) if at else None,
    )


@dataclass(frozen=True)
class LayoutName:
    """An image in an OCI image layout, ``oci:DIRECTORY[:TAG]``. Without a tag it is the
    only one of the layout."""

    path: Path
    tag: str | None = None

    def __str__(self) -> str:
        return f"{LAYOUT_PREFIX}{self.path}" + (f":{self.tag}" if self.tag else "")


def parse_layout(text: str) -> LayoutName:
    """Parse ``oci:DIRECTORY[:TAG]``. Raises UsageError."""
    path, colon, tag = text.removeprefix(LAYOUT_PREFIX).partition(":")
    if not path or (colon and not tag):
        raise UsageError(f"{text!r} names no layout", hint="write oci:DIRECTORY:TAG")
    return LayoutName(Path(os.path.abspath(path)), check_tag(tag) if colon else None)


Name: TypeAlias = Reference | LayoutName


def parse_name(text: str) -> Name:
    """Parse the name of an image that is made. Raises UsageError."""
    if text.startswith(LAYOUT_PREFIX):
        return parse_layout(text)
    if not text.startswith(_STORES) and parse_image(text) is None:
        raise UsageError(
            f"{text!r} names no image",
            hint=f"{_in_full(text)}write {_FORMS}, {_STORE_FORMS}, or "
            "oci:DIRECTORY[:TAG] for an image of a layout on this machine",
        )
    return parse_reference(text)


def parse_source(text: str) -> Name | Path:
    """Parse what an image is made of: a directory or a tar, which is a path that exists
    or begins with ``/`` or ``.``, or the name of another image. Raises UsageError."""
    if text.startswith(LAYOUT_PREFIX):
        return parse_layout(text)
    if text.startswith(("/", ".")) or os.path.lexists(text):
        if not os.path.exists(text):
            raise UsageError(f"there is no {text}", hint="name a directory or a tar")
        return Path(os.path.abspath(text))
    try:
        return parse_reference(text)
    except UsageError as error:
        raise UsageError(
            f"there is no file {text!r}, and it names no image ({error.message})",
            hint=f"{_in_full(text)}name a directory, a tar, oci:DIRECTORY[:TAG], "
            f"{_FORMS}, {_STORE_FORMS}",
        ) from error
