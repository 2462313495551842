"""What is in a directory elsewhere: below a prefix of an S3 bucket, or in the index of
a web server.

A listing comes from somebody else. It is bounded, and a name that no file can have is
an error, so that a tree has all that was listed, or is not made.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from btrfs_ublk.content import SourceKeys
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.connection import PASSING, REDIRECTIONS, deadline
from btrfs_ublk.image.logins import Login, basic, check_closed
from btrfs_ublk.image.transport import Answer, NoAnswer, Session
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume.entry import origin_of

#: Of files and directories together. Each has a place in the map and in the memory of
#: its server.
_MAX_ENTRIES = 200_000
_MAX_DEPTH = 64
#: Of one page of a listing.
_MAX_PAGE_BYTES = 32 * MIB
_MAX_NAME_BYTES = 255  # NAME_MAX


@dataclass(frozen=True)
class ListedFile:
    """A file of a listing. ``source`` is what MapClient.add() takes. ``mtime_s`` is in
    seconds since 1970, None where nobody says it."""

    path: str
    source: SourceKeys
    mtime_s: float | None = None


@dataclass
class Listing:
    """The files by path, and the paths of all directories. Readers add to it, and
    complete() checks the whole. Errors are BtrfsUblkError, and name the entry."""

    origin: str
    files: dict[str, ListedFile] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)

    def add(self, path: str, source: SourceKeys, mtime_s: float | None = None) -> None:
        """Add a file. A source of size 0 becomes that of an empty file."""
        self._check(path)
        if source.get("size") == 0:
            source = {"size": 0}
        other = self.files.setdefault(path, ListedFile(path, source, mtime_s))
        if other.source != source:
            raise self.refused(path, "is there twice, with different contents")
        self._count()

    def add_directory(self, path: str) -> None:
        """Add a directory, which may be empty."""
        self._check(path)
        self.directories.add(path)
        self._count()

    def refused(self, name: str, why: str, hint: str | None = None) -> BtrfsUblkError:
        return BtrfsUblkError(
            f"{self.origin} lists {name[:200]!r}, which {why}", hint=hint
        )

    def complete(self) -> Listing:
        """Add the directories that files are in, and check that no name is both."""
        if not self.files and not self.directories:
            raise BtrfsUblkError(
                f"{self.origin} lists nothing", hint="is its name right?"
            )
        for path in [*self.files, *self.directories]:
            while path := path.rpartition("/")[0]:
                if path in self.directories:
                    break
                self.directories.add(path)
        for path in self.directories & self.files.keys():
            raise self.refused(path, "is a file, and a directory too")
        return self

    def _check(self, path: str) -> None:
        parts = path.split("/")
        if len(parts) > _MAX_DEPTH:
            why = f"is more than {_MAX_DEPTH} directories deep"
            hint = "does a link in it lead to a directory above itself?"
            raise self.refused(path, why, hint)
        for part in parts:
            if part in ("", ".", "..") or "\0" in part or "\n" in part:
                raise self.refused(path, "no file can be named")
            if len(os.fsencode(part)) > _MAX_NAME_BYTES:
                why = f"has a name of more than {_MAX_NAME_BYTES} bytes"
                raise self.refused(path, why)

    def _count(self) -> None:
        if len(self.files) + len(self.directories) > _MAX_ENTRIES:
            raise BtrfsUblkError(
                f"{self.origin} lists more than {_MAX_ENTRIES} files and directories",
                hint="take a part of it",
            )


def read_listing(source: SourceKeys) -> Listing:
    """Read what a source of a tree lists: an ``s3`` one, whose key is a prefix, or an
    ``http`` one, whose URL is that of an index. The files have the other keys of the
    source, such as logins.

    The server of a file whose size is not listed is asked for it. Raises UsageError for
    a key that no such source has, BtrfsUblkError.
    """
    return (_read_bucket if source.get("kind") == "s3" else _read_index)(source)


def _identity(tag: str | None, date: str | None = None) -> SourceKeys:
    """Return the key of a source that has it recognized by its ETag and Last-Modified.
    One that is too long for the server of the map is none (csrc/content/identity.h)."""
    said = [
        f"{name} {text}"
        for name, text in (("etag", tag), ("modified", date))
        if text and len(text) < 100 and text.isascii() and text.isprintable()
    ]
    return {"identity": " ".join(said)} if said else {}


def _read_bucket(source: SourceKeys) -> Listing:
    """Read a prefix. A key that ends with "/" is a directory."""
    from btrfs_ublk.image.s3 import Bucket

    listing, prefix = Listing(origin_of(source)), source["key"]
    with closing(Bucket(listing.origin, source)) as bucket:
        for number, page in enumerate(bucket.pages(source["bucket"], prefix)):
            if number > _MAX_ENTRIES // 100:
                raise BtrfsUblkError(
                    f"{listing.origin} is listed in more than {number} pages",
                    hint="take a part of it",
                )
            for each in page:
                key, size = each.get("Key", ""), each.get("Size")
                if not isinstance(size, int) or size < 0:
                    raise listing.refused(key, "is an object without a size")
                path = key.removeprefix(prefix)
                if key == prefix and not size:
                    continue
                if path.endswith("/") and not size:
                    listing.add_directory(path.removesuffix("/"))
                    continue
                # Some stores leave its quotes out, but only here.
                tag = each.get("ETag", "").strip('"')
                more = _identity(tag and f'"{tag}"') | {"key": key, "size": size}
                at = each.get("LastModified")
                listing.add(path, source | more, at.timestamp() if at else None)
    return listing.complete()


#: As many as a server of a map has.
_AT_ONCE = 16
_TIMEOUT_S = (10.0, 60.0)
#: Between tries.
_PAUSES_S = (0.0, 0.4, 0.8, 1.6)
_MAX_REDIRECTIONS = 10
#: An answer has the time that so much may take.
_PATIENCE_BYTES = 8 * MIB
_KEYS = {"kind", "url", "ca_file", "basic_auth_file", "via", "via_plain", "unit"}
#: An object of so many bytes can be without ranges: it is kept whole (host.c).
_WHOLE_BYTES = 8 * MIB
_ACCEPT = "application/json, text/html;q=0.9"
_RANGE = re.compile(r"bytes (?:0-0|\*)/(\d{1,18})")
_LENGTH = re.compile(r"\d{1,18}")


class _Found(NamedTuple):
    """An entry of one directory; ``keys`` are what its source has besides the URL."""

    name: str
    url: str
    is_directory: bool = False
    keys: SourceKeys = {}
    mtime_s: float | None = None


class _Web:
    """Requests to the server of a source, with its login."""

    def __init__(self, source: SourceKeys) -> None:
        if unknown := sorted(source.keys() - _KEYS):
            raise UsageError(
                f"{unknown[0]!r} of {origin_of(source)} is no key of a tree's source",
                hint=f"there are: {', '.join(sorted(_KEYS))}",
            )
        self._origin = _origin(source["url"])
        self._login: dict[str, str] = {}
        if file := source.get("basic_auth_file"):
            user, _, password = _line(file).partition(":")
            self._login = {"Authorization": basic(Login(user, password))}
        self._session = Session("btrfs-ublk", source.get("ca_file"))

    @contextmanager
    def asked(
        self, url: str, headers: Mapping[str, str] | None = None, *, follow: bool = True
    ) -> Iterator[Answer]:
        """Get a URL, and yield the answer, whatever its status. Without ``follow``, so
        is a redirection."""
        given = {"Accept-Encoding": "identity", **(headers or {})}
        try:
            for _ in range(_MAX_REDIRECTIONS):
                response = self._ask(url, given)
                to = response.headers.get("Location")
                if not follow or not to or response.status_code not in REDIRECTIONS:
                    break
                response.close()
                url = urljoin(url, to)
            with response, deadline(response, _PATIENCE_BYTES):
                yield response
        except NoAnswer as error:
            raise BtrfsUblkError(
                f"{url}: {error}", hint="is the server there?"
            ) from error

    def _ask(self, url: str, headers: Mapping[str, str]) -> Answer:
        # NB: how long to wait is not the server's to say, as it might say a day.
        for pause_s in _PAUSES_S:
            try:
                response = self._send(url, headers)
                if response.status_code not in PASSING:
                    return response
                response.close()
            except NoAnswer as error:
                if not error.may_pass:
                    raise
            time.sleep(pause_s)
        return self._send(url, headers)

    def _send(self, url: str, headers: Mapping[str, str]) -> Answer:
        login = self._login if _origin(url) == self._origin else {}
        return self._session.send(
            "GET", url, headers={**headers, **login}, timeout_s=_TIMEOUT_S
        )

    def read(self, url: str, **more: Any) -> tuple[str, str]:
        """Return all of a document, as text, and its media type."""
        data = bytearray()
        with self.asked(url, **more) as response:
            if response.status_code != 200:
                raise _refusal(response)
            for part in response.iter_content(256 * KIB):
                data += part
                if len(data) > _MAX_PAGE_BYTES:
                    raise BtrfsUblkError(
                        f"{url} has more than {_MAX_PAGE_BYTES} bytes",
                        hint="is it a listing? If so, take a part of it",
                    )
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
        return data.decode("utf-8-sig", "surrogateescape"), kind


def _line(path: str) -> str:
    """Return the first line of a file with a secret, under the rules of the server."""
    try:
        with open(path, encoding="utf-8") as file:
            check_closed(Path(path), Path(path).stat())
            return file.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _refusal(response: Answer) -> BtrfsUblkError:
    hints = {
        401: "a login is wanted: --basic-auth-file",
        403: "does the server list directories (autoindex, Indexes), and for you?",
        404: "is the URL right?",
    }
    status, to = response.status_code, response.headers.get("Location")
    hint = f"it sends us to {to}: name that" if to else hints.get(status)
    return BtrfsUblkError(f"{response.url}: HTTP {status}", hint=hint)


def _read_index(source: SourceKeys) -> Listing:
    """Read a directory, and all below it: a request for each, and one for each file
    whose size the listing does not say."""
    listing, web = Listing(origin_of(source)), _Web(source)
    below = {"": source["url"]}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while below:
            found = list(pool.map(partial(_read_page, web), below.values()))
            parents, below = list(below), {}
            for parent, entries in zip(parents, found, strict=True):
                for each in entries:
                    if "/" in each.name:
                        raise listing.refused(each.name, "no file can be named")
                    path = f"{parent}{each.name}"
                    if each.is_directory:
                        listing.add_directory(path)
                        below[f"{path}/"] = each.url
                    else:
                        keys = source | {"url": each.url} | each.keys
                        listing.add(path, keys, each.mtime_s)
    return _complete(listing, web)


def _read_page(web: _Web, url: str) -> list[_Found]:
    # NB: where a redirection leads might get the login that the files have.
    text, kind = web.read(url, headers={"Accept": _ACCEPT}, follow=False)
    parse = parse_json if kind == "application/json" else parse_html
    return list(islice(parse(text, url), _MAX_ENTRIES + 1))


def _complete(listing: Listing, web: _Web) -> Listing:
    """Ask for the sizes that are not listed, and complete the listing."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        unknown = [x for x in listing.files.values() if "size" not in x.source]
        for file in pool.map(partial(_ask, web), unknown):
            listing.files[file.path] = file
    return listing.complete()


def _ask(web: _Web, file: ListedFile) -> ListedFile:
    """Ask for the first byte of a file, as its server will be asked for more, and learn
    its size, identity and time."""
    url = file.source["url"]
    with web.asked(url, headers={"Range": "bytes=0-0"}) as response:
        headers, status = response.headers, response.status_code
        if status == 206:
            next(response.iter_content(4 * KIB), b"")  # the connection is used again
        size = _RANGE.fullmatch(headers.get("Content-Range", ""))
        if status in (206, 416) and size is not None:
            size_bytes = int(size[1])
        elif status == 200 and _LENGTH.fullmatch(headers.get("Content-Length", "")):
            size_bytes = int(headers["Content-Length"])
            if size_bytes > _WHOLE_BYTES:
                raise BtrfsUblkError(
                    f"{url}: the server answers a range with all of the file",
                    hint="reads of a part need a server that has ranges",
                )
        else:
            raise _refusal(response)
    if not size_bytes:
        return ListedFile(file.path, {"size": 0}, _time(headers.get("Last-Modified")))
    date = headers.get("Last-Modified")
    more = {"size": size_bytes} | _identity(headers.get("ETag"), date)
    return ListedFile(file.path, file.source | more, file.mtime_s or _time(date))


def _time(text: object) -> float | None:
    """Parse a date of HTTP, or of RFC 3339; None where it is neither."""
    try:
        if isinstance(text, str) and text[:4].isdecimal():
            return datetime.fromisoformat(text).timestamp()
        return parsedate_to_datetime(str(text)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _below(href: str, page: str) -> tuple[str, str, bool] | None:
    """Return name and URL of an entry of a page, and whether that is a directory; None
    where the link leads elsewhere."""
    try:
        url = urljoin(page, href.strip())
        parts, base = urlsplit(url), urlsplit(page)
    except ValueError:
        return None
    path, top = unquote(parts.path, errors="surrogateescape"), unquote(base.path)
    if (parts.scheme, parts.netloc) != (base.scheme, base.netloc) or parts.query:
        return None
    # NB: before anything is decoded, so that no name has a slash by that.
    name = parts.path.rstrip("/").rpartition("/")[2]
    if not path.startswith(top) or path == top or path.endswith("//"):
        return None
    decoded = unquote(name, errors="surrogateescape")
    if path.removesuffix("/") != top + decoded:
        return None
    plain = quote(parts.path, safe="/%:@!$&'()*+,;=", errors="surrogateescape")
    url = parts._replace(path=plain, fragment="").geturl()
    return decoded, url, path.endswith("/")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def parse_html(text: str, page: str) -> Iterator[_Found]:
    """Yield the entries of an index in HTML."""
    parser = _Links()
    parser.feed(text)
    for href in parser.links:
        if entry := _below(href, page):
            yield _Found(*entry)


def parse_json(text: str, page: str) -> Iterator[_Found]:
    """Yield the entries of an index in JSON, as nginx and Caddy write it."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BtrfsUblkError(f"{page} is not JSON: {error}") from error
    if not isinstance(entries, list):
        entries = [entries]
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise BtrfsUblkError(
                f"{page} is JSON, but no listing: {str(entry)[:200]}",
                hint="of nginx (autoindex_format) or Caddy (browse) it would be one",
            )
        if entry.get("type") == "other":  # a socket, or a link to nowhere
            continue
        is_directory = entry.get("type") == "directory" or entry.get("is_dir") is True
        name = name.removesuffix("/") if is_directory else name
        size, keys = entry.get("size"), SourceKeys()
        if isinstance(size, int) and not is_directory and size >= 0:
            keys["size"] = size
        try:
            quoted = quote(name, safe="", errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise BtrfsUblkError(f"{page} lists {name!r}, which is no text") from error
        url = urljoin(page, f"./{quoted}")
        at = _time(entry.get("mtime") or entry.get("mod_time"))
        yield _Found(name, f"{url}/" if is_directory else url, is_directory, keys, at)
