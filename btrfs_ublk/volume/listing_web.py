"""Read the pages that web servers make of directories: JSON (nginx, Caddy), or HTML.

In HTML, a link to what is just below the page is an entry, as for rclone and wget. Its
size is not taken from there, as many servers round it: it is asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from btrfs_ublk.content import SourceKeys
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.connection import deadline, reason_of, system_certificates
from btrfs_ublk.image.credentials import check_closed
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume.entry import origin_of
from btrfs_ublk.volume.listing import (
    MAX_ENTRIES,
    MAX_PAGE_BYTES,
    ListedFile,
    Listing,
    identity,
    number,
)

#: As many as a server of a map has.
_AT_ONCE = 16
_TIMEOUT_S = (10.0, 60.0)
#: An answer has the time that so much may take.
_PATIENCE_BYTES = 8 * MIB
_KEYS = {"kind", "url", "ca_file", "basic_auth_file", "via", "via_plain", "unit"}
#: An object of so many bytes can be without ranges: it is kept whole (host.c).
_WHOLE_BYTES = 8 * MIB
_ACCEPT = "application/json, text/html;q=0.9"
_RANGE = re.compile(r"bytes (?:0-0|\*)/(\d{1,18})")


class Found(NamedTuple):
    """An entry of one directory; ``keys`` are what its source has besides the URL."""

    name: str
    url: str
    is_directory: bool = False
    keys: SourceKeys = {}
    mtime_s: float | None = None


class Web:
    """Requests with the login of a source, which only its own host gets."""

    def __init__(self, source: SourceKeys) -> None:
        if unknown := sorted(source.keys() - _KEYS):
            raise UsageError(
                f"{unknown[0]!r} of {origin_of(source)} is no key of a tree's source",
                hint=f"there are: {', '.join(sorted(_KEYS))}",
            )
        self._origin = _origin(source["url"])
        self._verify = source.get("ca_file") or system_certificates()
        self._authorization: Callable[..., Any] = _as_it_is
        if file := source.get("basic_auth_file"):
            user, _, password = _line(file).partition(":")
            self._authorization = requests.auth.HTTPBasicAuth(
                user.encode(), password.encode()
            )
        # NB: how long to wait is not the server's to say, as it might say a day.
        retry = Retry(
            total=4,
            backoff_factor=0.2,
            status_forcelist=(429, 500, 502, 503, 504),
            raise_on_status=False,
            respect_retry_after_header=False,
        )
        self._session = requests.Session()
        self._session.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            adapter = HTTPAdapter(pool_maxsize=_AT_ONCE, max_retries=retry)
            self._session.mount(scheme, adapter)

    @contextmanager
    def asked(self, url: str, **more: Any) -> Iterator[requests.Response]:
        """Get a URL, and yield the answer, whatever that is."""
        ours = _origin(url) == self._origin
        try:
            with (
                self._session.get(
                    url,
                    auth=self._authorization if ours else _as_it_is,
                    verify=self._verify,
                    stream=True,
                    timeout=_TIMEOUT_S,
                    **more,
                ) as response,
                deadline(response, _PATIENCE_BYTES),
            ):
                yield response
        except (requests.RequestException, OSError) as error:
            asked = getattr(getattr(error, "request", None), "url", None) or url
            raise BtrfsUblkError(
                f"{asked}: {reason_of(error)}", hint="is the server there?"
            ) from error

    def read(self, url: str, **more: Any) -> tuple[str, str]:
        """Return all of a document, as text, and its media type."""
        data = bytearray()
        with self.asked(url, **more) as response:
            if response.status_code != 200:
                raise _refusal(response)
            for part in response.iter_content(256 * KIB):
                data += part
                if len(data) > MAX_PAGE_BYTES:
                    raise BtrfsUblkError(
                        f"{url} has more than {MAX_PAGE_BYTES} bytes",
                        hint="is it a listing? If so, take a part of it",
                    )
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
        return data.decode("utf-8-sig", "surrogateescape"), kind


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Keeps ~/.netrc from being sent."""
    return request


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


def _refusal(response: requests.Response) -> BtrfsUblkError:
    hints = {
        401: "a login is wanted: --basic-auth-file",
        403: "does the server list directories (autoindex, Indexes), and for you?",
        404: "is the URL right?",
    }
    status, to = response.status_code, response.headers.get("Location")
    hint = f"it sends us to {to}: name that" if to else hints.get(status)
    return BtrfsUblkError(f"{response.url}: HTTP {status}", hint=hint)


def read_index(source: SourceKeys) -> Listing:
    """Read a directory, and all below it: a request for each, and one for each file
    whose size the listing does not say."""
    listing, web = Listing(origin_of(source)), Web(source)
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
    return complete(listing, web)


def _read_page(web: Web, url: str) -> list[Found]:
    # NB: where a redirection leads might get the login that the files have.
    text, kind = web.read(url, headers={"Accept": _ACCEPT}, allow_redirects=False)
    parse = parse_json if kind == "application/json" else parse_html
    return list(islice(parse(text, url), MAX_ENTRIES + 1))


def complete(listing: Listing, web: Web) -> Listing:
    """Ask for the sizes that are not listed, and complete the listing."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        unknown = [x for x in listing.files.values() if "size" not in x.source]
        for file in pool.map(partial(_ask, web), unknown):
            listing.files[file.path] = file
    return listing.complete()


def _ask(web: Web, file: ListedFile) -> ListedFile:
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
        elif (
            status == 200
            and (whole := number(headers.get("Content-Length"))) is not None
        ):
            size_bytes = whole
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
    more = {"size": size_bytes} | identity(headers.get("ETag"), date)
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


def parse_html(text: str, page: str) -> Iterator[Found]:
    """Yield the entries of an index in HTML."""
    parser = _Links()
    parser.feed(text)
    for href in parser.links:
        if entry := _below(href, page):
            yield Found(*entry)


def parse_json(text: str, page: str) -> Iterator[Found]:
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
        time = _time(entry.get("mtime") or entry.get("mod_time"))
        yield Found(name, f"{url}/" if is_directory else url, is_directory, keys, time)
