"""Files and trees of a kept volume: their paths, and the sources of their content."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import unquote, urlsplit

from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.urls import shown_text
from btrfs_ublk.content import SourceKeys
from btrfs_ublk.content.oci import has_tag, parse_image
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import parse_size

#: What is printed about a volume has so many files: there may be thousands.
SHOWN_FILES = 20
#: Keys that describe a source's content, but not its location.
_KNOWLEDGE = ("size", "unit", "digests", "root")


@dataclass(frozen=True)
class VolumeFile:
    """``path`` is relative to the volume's top directory. ``source`` is what
    MapClient.add() takes, or ``{"size": 0}`` for an empty file, which has no source.
    """

    path: str
    source: SourceKeys

    def __post_init__(self) -> None:
        """Raise UsageError for a path that cannot be in a volume, and for values that
        no source can have.
        """
        path = path_beneath(self.path)
        if path is None:
            raise UsageError(
                f"{self.path!r} is no path of a file in a volume",
                hint="it is relative to the volume's top directory, without ..",
            )
        if "\0" in self.path or "\n" in self.path:
            raise UsageError(
                f"{self.path!r} is no name for a file",
                hint="it has a newline or a NUL: choose another",
            )
        check_text(self.path, "path")
        object.__setattr__(self, "path", path)
        _check_value(self.source, f"source of {self.path!r}")
        more = sorted(self.source.keys() - {"size"})
        if self.source.get("size") == 0 and more:
            raise UsageError(
                f"file {self.path!r} has size 0, and {', '.join(more)}",
                hint="an empty file has nothing but a path and size = 0; a file that "
                "is fetched has the size of its source",
            )
        digests = self.source.get("digests", [])
        if not isinstance(digests, list | tuple) and not _is_file_of_digests(digests):
            raise UsageError(
                f"digests of {self.path!r} are {digests!r}",
                hint='they are a list of SHA-256, or {"path": …} of a file, absolute',
            )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to fetch."""
        return _is_empty(self.source)

    @property
    def origin(self) -> str:
        """The location of its content, for people."""
        return describe_source(self.source)

    def is_same_as(self, other: VolumeFile) -> bool:
        """Whether both have the same path, and sources at the same place."""
        return self.path == other.path and _is_same(
            _place(self.source), _place(other.source)
        )

    @property
    def has_tag(self) -> bool:
        """Whether a mirror of its source names a tag without a digest."""
        return has_tag(self.source)

    def to_keys(self) -> dict[str, Any]:
        """Return the file's table of a definition."""
        if self.is_empty:
            return {"path": self.path, "size": 0}
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
    def from_keys(cls, keys: dict[str, Any]) -> Self:
        """Make a file from a table of a definition. Raises UsageError."""
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
        knowledge = _knowledge(keys, what)
        if ("url" in keys) == ("source" in keys):
            if "url" not in keys and knowledge.get("size") == 0:
                return cls(path, knowledge)
            raise UsageError(
                f"{what} needs either url or source", hint="or size = 0: an empty file"
            )
        source = keys["source"] if "source" in keys else cls.parse_source(keys["url"])
        if not isinstance(source, dict):
            raise UsageError(f"{what}: source is no table")
        return cls(path, source | knowledge)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "PATH=URL". Raises UsageError."""
        path, equals, url = text.partition("=")
        # NB: a URL alone may contain an equals sign.
        if not (path and equals and url) or "://" in path:
            raise UsageError(
                f"{text!r} is not PATH=URL", hint="big.bin=https://example.org/big"
            )
        return cls(path, cls.parse_source(url))

    @staticmethod
    def parse_source(text: object) -> SourceKeys:
        return source_of(text)

    @classmethod
    def parse_url_file(cls, text: str) -> Self:
        """Parse "PATH=FILE"; the file contains the URL. Raises UsageError."""
        path, equals, file = text.partition("=")
        if not (path and equals and file):
            raise UsageError(
                f"{text!r} is not PATH=FILE", hint="big.bin=/etc/keys/big.url"
            )
        # The server has another working directory.
        return cls(path, {"kind": "http", "url_file": os.path.abspath(file)})


def path_beneath(path: str) -> str | None:
    """Return a relative path without what says nothing; None for one that is absolute,
    or has "..", or is the top itself."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not parts:
        return None
    return "/".join(parts)


def check_text(text: str, what: str) -> None:
    """Raise UsageError for a text that a definition cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{what} {text!r} is no text in UTF-8", hint="choose another name"
        ) from error


def _check_value(value: object, what: str) -> None:
    """Raise UsageError for a value that JSON or TOML cannot hold."""
    if isinstance(value, str):
        check_text(value, what)
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(each, str) or not each.isascii():
                _check_value(each, f"{what}: {key}")
    elif isinstance(value, list | tuple):
        for each in value:
            _check_value(each, what)
    elif not isinstance(value, str | int | float) or (
        isinstance(value, float) and not isfinite(value)
    ):
        raise UsageError(
            f"{what} is {value!r}",
            hint="it consists of texts, numbers, true, false, lists and tables",
        )


def _is_file_of_digests(value: object) -> bool:
    """Whether it is the absolute path of a file of digests, for the server to open."""
    return (
        isinstance(value, dict)
        and list(value) == ["path"]
        and isinstance(value["path"], str)
        and value["path"].startswith("/")
    )


def source_of(url: object) -> SourceKeys:
    """Parse a source from a URL (http, https, s3, oci or file), an absolute path, or
    the JSON of a source. Raises UsageError.
    """
    if not isinstance(url, str):
        raise UsageError(f"url is {url!r}, not a text in quotes")
    if url.startswith("{"):
        try:
            source: SourceKeys = json.loads(url)
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
            # NB: the key is literal, unlike in an http URL: it may have ? and #.
            bucket, _, key = url.removeprefix("s3://").partition("/")
            return {"kind": "s3", "bucket": bucket, "key": key}
        case "oci" if image := parse_image(url.removeprefix("oci://").strip("/")):
            return image
    raise UsageError(
        f"{url!r} is no source",
        hint="http://…, https://…, s3://BUCKET/KEY, oci://REGISTRY/REPOSITORY:TAG or"
        " @DIGEST, /PATH, or the JSON of a source (docs/materialisation.md)",
    )


def describe_source(source: SourceKeys) -> str:
    """Describe a source for people: by its URL without query, else as JSON."""
    if _is_empty(source):
        return "nothing: it is empty"
    return shown_text(_url_of(source) or json.dumps(_place(source)))


def origin_of(source: SourceKeys) -> str:
    """Return the location of a listing, for people."""
    if source.get("kind") == "s3":
        return f"s3://{source['bucket']}/{source['key']}"
    return shown_text(str(source.get("url") or source.get("path")))


def _is_empty(source: SourceKeys) -> bool:
    return source == {"size": 0}


def _url_of(source: SourceKeys) -> str | None:
    place = _place(source)
    for form in _FORMS.get(str(place.get("kind")), ()):
        try:
            url = form.format(**place)
            if source_of(url) == place:
                return url
        except (KeyError, UsageError):
            pass
    return None


#: By the kind of a source: what its URL may be.
_FORMS = {
    "http": ("{url}",),
    "file": ("{path}",),
    "s3": ("s3://{bucket}/{key}",),
    "oci": tuple(
        f"oci://{{registry}}/{{repository}}{which}"
        for which in (":{tag}@{digest}", ":{tag}", "@{digest}")
    ),
}


def _is_same(one: SourceKeys, other: SourceKeys) -> bool:
    """Compare places. A tag equals the digest to which it was resolved."""
    ours, theirs = one.get("mirrors"), other.get("mirrors")
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(
            isinstance(x, dict) and isinstance(y, dict) and _is_same(x, y)
            for x, y in zip(ours, theirs, strict=True)
        )
    if one.get("kind") != "oci":
        return one == other
    less = "tag" if "digest" in one and "digest" in other else "digest"
    return {key: value for key, value in one.items() if key != less} == {
        key: value for key, value in other.items() if key != less
    }


def _place(source: SourceKeys) -> SourceKeys:
    return {key: value for key, value in source.items() if key not in _KNOWLEDGE}


def _knowledge(keys: dict[str, Any], what: str) -> SourceKeys:
    """Return what a table says about its source besides the location."""
    found: SourceKeys = {}
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


class VolumeTree(VolumeFile):
    """A directory of a volume: its path, and the source that lists its files, as
    read_listing() takes it."""

    def __post_init__(self) -> None:
        """Raise UsageError as VolumeFile does, and for a source that lists nothing."""
        super().__post_init__()
        match self.source:
            case {"kind": "s3", "bucket": str(), "key": str(key)}:
                if key and not key.endswith("/"):
                    raise _no_tree(key)
            case {"kind": "http", "url": text}:
                tree_source(text)
            case _:
                raise _no_tree(str(self.source))

    @staticmethod
    def parse_source(text: object) -> SourceKeys:
        return tree_source(text)


def tree_source(text: object) -> SourceKeys:
    """Parse what a tree is listed by: s3://BUCKET/PREFIX/ or
    http(s)://HOST/DIRECTORY/. Raises UsageError."""
    if not isinstance(text, str):
        raise _no_tree(str(text))
    scheme, colon, rest = text.partition("://")
    if scheme == "s3" and colon and (bucket := rest.partition("/")[0]):
        prefix = rest.partition("/")[2].rstrip("/")
        return {"kind": "s3", "bucket": bucket, "key": f"{prefix}/" if prefix else ""}
    if scheme in ("http", "https") and colon:
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise UsageError(f"{text!r} is no URL: {error}") from error
        if parts.hostname and parts.path.endswith("/") and not parts.query:
            return {"kind": "http", "url": parts._replace(fragment="").geturl()}
    raise _no_tree(text)


def _no_tree(text: str) -> UsageError:
    return UsageError(
        f"{text!r} lists no tree",
        hint="s3://BUCKET/PREFIX/ or http(s)://HOST/DIRECTORY/; of a directory, a tar "
        "or an image: btrfs-ublk volume add-tree",
    )


#: The kinds of sources that each key applies to.
_KINDS = {
    "endpoint": ("s3",),
    "credentials_file": ("s3",),
    "basic_auth_file": ("http",),
    "ca_file": ("http", "s3", "oci"),
}


_File = TypeVar("_File", bound=VolumeFile)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Keys for sources; None where not given. A key that a source has itself wins."""

    endpoint: str | None = None
    credentials_file: Path | None = None
    basic_auth_file: Path | None = None
    ca_file: Path | None = None

    def given_to(
        self, files: Sequence[_File], environment: Mapping[str, str] = os.environ
    ) -> list[_File]:
        """Return the files with these keys, and with the environment's endpoint. Raises
        UsageError for a key that applies to none of the files.
        """
        # NB: the help of commands imports this module.
        from btrfs_ublk.content.s3 import s3_keys

        kinds = {file.source.get("kind") for file in files}
        keys: SourceKeys = {}
        for key, of in _KINDS.items():
            value = getattr(self, key)
            if value is None:
                continue
            if not kinds.intersection(of):
                adding = "--add-file, or --url-file," if "http" in of else "--add-file"
                raise UsageError(
                    f"--{key.replace('_', '-')} is about files from {' or '.join(of)}, "
                    "and no such file is added",
                    hint=f"give it together with the {adding} that needs it",
                )
            # The server has another working directory.
            keys[key] = str(value.absolute()) if isinstance(value, Path) else value
        if "endpoint" not in keys and (found := s3_keys(environment).get("endpoint")):
            keys["endpoint"] = found

        def entered(file: _File) -> _File:
            kind = file.source.get("kind")
            more = {key: x for key, x in keys.items() if kind in _KINDS[key]}
            return replace(file, source=more | file.source) if more else file

        return list(map(entered, files))
