"""One file of a kept volume: its path there, and where its content comes from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from btrfs_ublk.errors import UsageError
from btrfs_ublk.lazy import Source
from btrfs_ublk.units import parse_size

#: What is known of a source, and not where it is.
_KNOWLEDGE = ("size", "unit", "digests", "root")


@dataclass(frozen=True)
class VolumeFile:
    """``path`` is relative to the volume's top directory; ``source`` as MapClient.add()
    takes it.
    """

    path: str
    source: Source

    def __post_init__(self) -> None:
        """Raise UsageError for a path that is none in a volume, and for what no source
        can have.
        """
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise UsageError(
                f"{self.path!r} is no path of a file in a volume",
                hint="it is relative to the volume's top directory, without ..",
            )
        if "\0" in self.path or "\n" in self.path:
            raise UsageError(f"{self.path!r} is no name for a file")
        object.__setattr__(self, "path", str(path))
        _check_value(self.source, f"source of {self.path!r}")
        digests = self.source.get("digests", [])
        if not isinstance(digests, list | tuple) and not _is_file_of_digests(digests):
            raise UsageError(
                f"digests of {self.path!r} are {digests!r}",
                hint='a list of SHA-256, or {"path": …} of a file, absolute',
            )

    @property
    def origin(self) -> str:
        """Where its content is, for people."""
        return describe_source(self.source)

    def is_same_as(self, other: VolumeFile) -> bool:
        """Whether both come from the same place, whatever else is known of that."""
        return self.path == other.path and _place(self.source) == _place(other.source)

    def to_keys(self) -> dict[str, Any]:
        """As a definition has it."""
        url = _url_of(self.source)
        if url is None:
            return {"path": self.path, "source": self.source}
        keys = {"path": self.path, "url": url}
        for name in _KNOWLEDGE:
            if name in self.source:
                value = self.source[name]
                is_file = name == "digests" and isinstance(value, dict)
                keys[name] = value["path"] if is_file else value
        return keys

    @classmethod
    def from_keys(cls, keys: dict[str, Any]) -> VolumeFile:
        """From a table of a definition. Raises UsageError."""
        path = keys.get("path")
        if not isinstance(path, str):
            raise UsageError(f"a file's path is {path!r}, not a text in quotes")
        what = f"file {path!r}"
        known = {"path", "url", "source", *_KNOWLEDGE}
        for key in keys.keys() - known:
            raise UsageError(
                f"{what}: key {key!r} is unknown",
                hint=f"there are: {', '.join(sorted(known))}",
            )
        if ("url" in keys) == ("source" in keys):
            raise UsageError(f"{what} needs either url or source")
        source = keys["source"] if "source" in keys else source_of(keys["url"])
        if not isinstance(source, dict):
            raise UsageError(f"{what}: source is no table")
        return cls(path, source | _knowledge(keys, what))

    @classmethod
    def parse(cls, text: str) -> VolumeFile:
        """From "PATH=URL". Raises UsageError."""
        path, equals, url = text.partition("=")
        if not (path and equals and url):
            raise UsageError(
                f"{text!r} is not PATH=URL", hint="big.bin=https://example.org/big"
            )
        return cls(path, source_of(url))


def _check_value(value: object, what: str) -> None:
    """Raise UsageError for what is not both in JSON and in TOML."""
    if isinstance(value, dict):
        for key, each in value.items():
            _check_value(each, f"{what}: {key}")
    elif isinstance(value, list | tuple):
        for each in value:
            _check_value(each, what)
    elif not isinstance(value, str | int | float):
        raise UsageError(
            f"{what} is {value!r}", hint="texts, numbers, true, false, lists and tables"
        )


def _is_file_of_digests(value: object) -> bool:
    """What a definition says as a path, and a server opens."""
    return (
        isinstance(value, dict)
        and list(value) == ["path"]
        and isinstance(value["path"], str)
        and value["path"].startswith("/")
    )


def source_of(url: object) -> Source:
    """A source from a URL: http, https, s3, oci or file; from an absolute path; or from
    the JSON of a source. Raises UsageError.
    """
    if not isinstance(url, str):
        raise UsageError(f"url is {url!r}, not a text in quotes")
    if url.startswith("{"):
        try:
            source: Source = json.loads(url)
        except ValueError as error:
            raise UsageError(f"{url!r} is not valid JSON: {error}") from error
        return source
    if url.startswith("/"):
        return {"kind": "file", "path": url}
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL: {error}") from error
    match parts.scheme:
        case "http" | "https":
            return {"kind": "http", "url": url}
        case "file" if parts.netloc in ("", "localhost") and parts.path != "":
            return {"kind": "file", "path": unquote(parts.path)}
        case "s3" if parts.netloc and parts.path.strip("/"):
            # NB: the key as it is, not as in a URL: ? and # may be in it.
            bucket, _, key = url.removeprefix("s3://").partition("/")
            return {"kind": "s3", "bucket": bucket, "key": key}
        case "oci" if "@" in parts.path:
            repository, _, digest = parts.path.strip("/").partition("@")
            registry = {"kind": "oci", "registry": parts.netloc}
            return registry | {"repository": repository, "digest": digest}
    raise UsageError(
        f"{url!r} is no source",
        hint="http://…, https://…, s3://BUCKET/KEY, oci://REGISTRY/REPOSITORY@DIGEST,"
        " /PATH, or the JSON of a source (docs/materialisation.md)",
    )


def describe_source(source: Source) -> str:
    """For people: its URL, where one says all of where it is."""
    return _url_of(source) or json.dumps(_place(source))


def _url_of(source: Source) -> str | None:
    place = _place(source)
    for form in ("{url}", "{path}", "s3://{bucket}/{key}", _OCI_FORM):
        try:
            url = form.format(**place)
            if source_of(url) == place:
                return url
        except (KeyError, UsageError):
            pass
    return None


_OCI_FORM = "oci://{registry}/{repository}@{digest}"


def _place(source: Source) -> Source:
    return {key: value for key, value in source.items() if key not in _KNOWLEDGE}


def _knowledge(keys: dict[str, Any], what: str) -> Source:
    """What a table says of its source besides its place."""
    found: Source = {}
    for key in ("size", "unit"):
        if key in keys:
            found[key] = parse_size(str(keys[key]), what=f"{what}: {key}")
    digests = keys.get("digests")
    if isinstance(digests, str):
        if not digests.startswith("/"):
            raise UsageError(f"{what}: digests {digests} is not an absolute path")
        found["digests"] = {"path": digests}
    elif digests is not None:
        found["digests"] = digests
    if "root" in keys:
        found["root"] = keys["root"]
    return found
