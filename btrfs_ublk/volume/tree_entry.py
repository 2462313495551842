"""One tree of a kept volume: its path, and the source that lists its files."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from btrfs_ublk.content import SourceKeys
from btrfs_ublk.errors import UsageError
from btrfs_ublk.volume.entry import VolumeFile

if TYPE_CHECKING:
    from btrfs_ublk.volume.listing import Listing

#: The names of files that are read as manifests, see listing_manifest.
MANIFESTS = ("*.meta4", "fetch.txt")


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
            case {"kind": "http", "url": text} | {"kind": "file", "path": text}:
                tree_source(text)
            case _:
                raise _no_tree(str(self.source))

    @staticmethod
    def parse_source(text: object) -> SourceKeys:
        return tree_source(text)


def tree_source(text: object) -> SourceKeys:
    """Parse what a tree is listed by: s3://BUCKET/PREFIX/, http(s)://HOST/DIRECTORY/,
    or the URL or path of a manifest. Raises UsageError."""
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
        is_index = parts.path.endswith("/") and not parts.query
        if parts.hostname and (is_index or _is_manifest(parts.path)):
            return {"kind": "http", "url": parts._replace(fragment="").geturl()}
    elif not colon and _is_manifest(text):
        return {"kind": "file", "path": os.path.abspath(text)}
    raise _no_tree(text)


def _no_tree(text: str) -> UsageError:
    return UsageError(
        f"{text!r} lists no tree",
        hint="s3://BUCKET/PREFIX/, http(s)://HOST/DIRECTORY/, or the path or URL of a "
        f"manifest ({', '.join(MANIFESTS)}); of a directory, a tar or an image: "
        "btrfs-ublk volume add-tree",
    )


def _is_manifest(path: str) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) for pattern in MANIFESTS)


def read_listing(source: SourceKeys) -> Listing:
    """Read what a source of a tree lists: an ``s3`` one, whose key is a prefix, an
    ``http`` one, whose URL is that of an index and ends with ``/``, or one of a
    manifest, which may be a ``file`` as well. The files have the other keys of the
    source, such as logins; those of a manifest only where they are on its host.

    A file whose size is not listed is asked for it. Raises UsageError for a source that
    is none of these, BtrfsUblkError.
    """
    if source.get("kind") == "s3":
        from btrfs_ublk.volume.listing_s3 import read_bucket

        return read_bucket(source)
    if source.get("kind") == "http" and urlsplit(source["url"]).path.endswith("/"):
        from btrfs_ublk.volume.listing_web import read_index

        return read_index(source)
    from btrfs_ublk.volume.listing_manifest import read_manifest

    return read_manifest(source)
