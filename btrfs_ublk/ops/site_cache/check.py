"""Asks a running site cache as hosts do, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import requests

from btrfs_ublk.base.hosts import (
    HITS,
    SLICE_HEADER,
    cache_status,
    check_cache,
    is_plain,
)
from btrfs_ublk.base.urls import shown_text
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.connection import reason_of
from btrfs_ublk.units import format_size

_TIMEOUT_S = (5.0, 30.0)
_WRONG_TOKEN = "Bearer of-nobody"


@dataclass(frozen=True)
class Finding:
    """``right`` is None for what cannot be told."""

    name: str
    right: bool | None
    text: str
    hint: str = ""


@dataclass(frozen=True)
class Target:
    """A cache, an object behind it, the unit that sources of it have, and a token that
    may read it. ``ca_file`` has certificates to trust."""

    cache: str
    url: str
    unit_bytes: int
    token: str | None = None
    ca_file: str | None = None

    def __post_init__(self) -> None:
        check_cache(self.cache, "the cache")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"object {shown_text(self.url)} is no http or https URL")
        if parts.username is not None or parts.fragment:
            raise UsageError("the object's URL has a user, or a fragment")

    def get(self, *, direct: bool = False, authorization: str | None = None) -> _Answer:
        """Ask for its first unit. Raises BtrfsUblkError without an answer."""
        parts = urlsplit(self.url)
        headers = {
            "Range": f"bytes=0-{self.unit_bytes - 1}",
            "Accept-Encoding": "identity",
        }
        url = self.url
        if not direct:
            path = parts._replace(scheme="", netloc="").geturl() or "/"
            url = self.cache.rstrip("/") + path
            headers["Host"] = parts.netloc
        if authorization is not None:
            headers["Authorization"] = authorization
        try:
            with requests.Session() as session:
                session.trust_env = False
                response = session.get(
                    url,
                    headers=headers,
                    timeout=_TIMEOUT_S,
                    stream=True,
                    allow_redirects=direct,
                    verify=self.ca_file or True,
                )
                with response:
                    # NB: a server that knows no ranges would send all of it.
                    data = response.raw.read(self.unit_bytes + 1)
                    return _Answer(response.status_code, response.headers, data)
        except (requests.RequestException, OSError) as error:
            place = shown_text(url)
            raise BtrfsUblkError(
                f"{place} does not answer: {reason_of(error)}",
                hint="does it run, and can this machine reach it?",
            ) from error


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: requests.structures.CaseInsensitiveDict[str]
    data: bytes

    @property
    def verdict(self) -> str | None:
        return cache_status(self.headers)


def check_site_cache(target: Target) -> Iterator[Finding]:
    """Yield what was found. Raises BtrfsUblkError when the origin does not answer, so
    that nothing can be said."""
    token = None if target.token is None else f"Bearer {target.token}"
    origin = target.get(direct=True, authorization=token)
    if origin.status != 206:
        raise BtrfsUblkError(
            f"the origin answers {shown_text(target.url)} with HTTP {origin.status}, "
            "not with a range (206)",
            hint="name an object that this machine may read: --token-file",
        )
    try:
        first = target.get(authorization=token)
    except BtrfsUblkError as error:
        yield Finding("answers", False, error.message, error.hint or "")
        return
    yield _host(target, first, origin)
    if first.status != 206:
        return
    yield _content(first, origin)
    yield _cached(target.get(authorization=token))
    yield _slice(target, first)
    yield _authorisation(target, origin)
    if token is not None and is_plain(target.cache):
        yield Finding(
            "TLS",
            False,
            "tokens go to it without TLS",
            "give it a certificate: site-cache config --certificate --key",
        )


def _host(target: Target, first: _Answer, origin: _Answer) -> Finding:
    host = urlsplit(target.url).netloc
    if first.status == 206:
        return Finding("answers", True, f"it answers for {host}")
    if first.status == 200:
        return Finding(
            "answers",
            False,
            "it answers with the whole object, not with the range",
            "pass Range on: slice, and proxy_set_header Range $slice_range",
        )
    hint = f"does it pass Host ({host}) and Authorization on, and know that origin?"
    if first.status == 403 and target.token is None:
        hint = "does the origin redirect? Then only callers with a token: --token-file"
    return Finding(
        "answers",
        False,
        f"it answers HTTP {first.status}, and the origin {origin.status}",
        hint,
    )


def _content(first: _Answer, origin: _Answer) -> Finding:
    if first.data != origin.data:
        return Finding(
            "content",
            False,
            "its bytes are not those of the origin",
            "it has an older object, or another one: is Host part of the cache's key?",
        )
    tags = first.headers.get("ETag"), origin.headers.get("ETag")
    if tags[0] != tags[1]:
        return Finding(
            "content",
            False,
            f"its ETag is {tags[0]}, and that of the origin {tags[1]}",
            "hosts would leave it alone: do not change ETags, as by compressing",
        )
    return Finding("content", True, "the bytes of the origin, with its ETag")


def _cached(second: _Answer) -> Finding:
    verdict = second.verdict
    if verdict is None:
        return Finding(
            "cached",
            None,
            "it does not say whether it had the range: no X-Site-Cache or X-Cache",
            "look for a second request in the origin's log",
        )
    if verdict in HITS:
        return Finding("cached", True, "the second request was answered by the cache")
    return Finding(
        "cached",
        False,
        f"the second request of a range was no hit ({verdict})",
        "store status 206, with the range in the key, and enough room",
    )


def _slice(target: Target, first: _Answer) -> Finding:
    text = first.headers.get(SLICE_HEADER, "")
    unit = format_size(target.unit_bytes)
    if not text.isdecimal():
        return Finding("slice", None, "it does not say how large its slices are")
    size = int(text)
    if size == target.unit_bytes:
        return Finding("slice", True, f"slices of {unit}, as the unit")
    return Finding(
        "slice",
        False,
        f"slices of {format_size(size)} do not fit units of {unit}",
        f"write it anew with --unit {unit.replace(' ', '').removesuffix('iB')}",
    )


def _authorisation(target: Target, origin: _Answer) -> Finding:
    for authorization, who in ((None, "no token"), (_WRONG_TOKEN, "a wrong token")):
        direct = target.get(direct=True, authorization=authorization)
        # NB: a page to log in at is an answer as well.
        if direct.status == 206 and direct.data == origin.data:
            if authorization is None:
                return Finding(
                    "authorisation", True, "the origin gives it to everybody"
                )
            continue
        status = target.get(authorization=authorization).status
        if status == 206:
            return Finding(
                "authorisation",
                False,
                f"it gives what the origin refuses to {who} (HTTP {status})",
                "ask the origin for each caller: auth_request",
            )
    return Finding("authorisation", True, "who may not read it at the origin gets none")
