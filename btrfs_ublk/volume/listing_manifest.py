"""Read a manifest: Metalink 4 (RFC 5854), or the fetch.txt of BagIt (RFC 8493)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

from btrfs_ublk.content import SourceKeys
from btrfs_ublk.errors import BtrfsUblkError, UsageError, why_unread
from btrfs_ublk.units import BLOCK_BYTES, MIB
from btrfs_ublk.volume.entry import origin_of
from btrfs_ublk.volume.listing import MAX_PAGE_BYTES, Listing, number
from btrfs_ublk.volume.listing_web import Web, complete

_METALINK = "{urn:ietf:params:xml:ns:metalink}"
_UNITS = [str(BLOCK_BYTES << power) for power in range(9)]
_FETCH = re.compile(r"(\S+)[ \t]+(\d{1,18}|-)[ \t]+(.+)")

#: Gets a URL, and returns the keys of a source with it.
Keys = Callable[[str], SourceKeys]


def read_manifest(source: SourceKeys) -> Listing:
    """Read a manifest, and ask for sizes that it does not have."""
    listing, there = Listing(origin_of(source)), source.get("url", "")
    unit = {key: value for key, value in source.items() if key == "unit"}
    source = {key: value for key, value in source.items() if key != "unit"}
    web = Web(source if there else {"kind": "http", "url": ""})
    text = web.read(there)[0] if there else _read(source)

    def keys(url: str) -> SourceKeys:
        parts, ours = urlsplit(url), urlsplit(there)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise listing.refused(url, "is no URL of http or https")
        if parts[:2] == ours[:2]:
            return source | {"url": url}
        return {"kind": "http", "url": url}

    is_lines = urlsplit(there or source["path"]).path.endswith(".txt")
    (parse_fetch if is_lines else parse_metalink)(text, listing, keys)
    for path, file in complete(listing, web).files.items():
        if file.source != {"size": 0}:
            listing.files[path] = replace(file, source=unit | file.source)
    return listing


def _read(source: SourceKeys) -> str:
    path = Path(source["path"])
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PAGE_BYTES + 1)
        if len(data) > MAX_PAGE_BYTES:
            raise UsageError(f"{path} has more than {MAX_PAGE_BYTES} bytes")
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"manifest {path}: {why_unread(error)}") from error


def _parse_xml(text: str, what: str) -> ElementTree.Element:
    """Parse a document that defines no entities. NB: of text, so that no encoding that
    it declares hides any."""
    try:
        if "<!DOCTYPE" in text:
            raise ValueError("it has a DOCTYPE")
        return ElementTree.fromstring(text)
    except (ValueError, ElementTree.ParseError) as error:
        raise BtrfsUblkError(f"{what} is not XML that is read: {error}") from error


def parse_metalink(text: str, listing: Listing, keys: Keys) -> None:
    """Add the files of a Metalink document. Several URLs become mirrors, and pieces
    units, if they have the size of one; the digest of a whole file is that of its only
    unit, if it has one."""
    for file in _parse_xml(text, listing.origin).iter(f"{_METALINK}file"):
        name = file.get("name") or ""
        urls = sorted(
            file.iter(f"{_METALINK}url"),
            key=lambda url: number(url.get("priority")) or 999_999,
        )
        mirrors = [
            keys(url)
            for each in urls
            if (url := (each.text or "").strip()).startswith(("http://", "https://"))
        ]
        if not mirrors:
            raise listing.refused(name, "has no URL of http or https")
        source: SourceKeys = mirrors[0] if len(mirrors) == 1 else {"mirrors": mirrors}
        size = number(file.findtext(f"{_METALINK}size"))
        if size is not None:
            source |= {"size": size}
        elif len(mirrors) > 1:
            raise listing.refused(name, "has several URLs, and no size")
        pieces = file.find(f"{_METALINK}pieces[@type='sha-256']")
        whole = (file.findtext(f"{_METALINK}hash[@type='sha-256']") or "").strip()
        if pieces is not None and (unit := pieces.get("length")) in _UNITS:
            of_pieces = [(each.text or "").strip().lower() for each in pieces]
            source |= {"unit": int(unit), "digests": of_pieces}
        elif whole and size and size <= MIB:
            source |= {"unit": MIB, "digests": [whole.lower()]}
        listing.add(name, source)


def parse_fetch(text: str, listing: Listing, keys: Keys) -> None:
    """Add the files of a fetch.txt: URL, size or "-", and path in a line."""
    for line in text.splitlines():
        match = _FETCH.fullmatch(line.strip())
        if match is None:
            raise BtrfsUblkError(
                f"{listing.origin} has a line {line[:200]!r}, not URL SIZE PATH"
            )
        url, size, path = match.groups()
        for code, char in (("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
            path = re.sub(code, char, path, flags=re.IGNORECASE)
        source = keys(url)
        listing.add(path, source if size == "-" else source | {"size": int(size)})
