"""Requests to a registry: TLS, tokens, redirections, and a bounded number of retries.

Tokens are the "token authentication" of the CNCF's distribution project. They go to
the registry only, and passwords only to a token server with TLS, or on loopback.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlencode, urljoin, urlsplit

from btrfs_ublk.base.log import log
from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess, RegistryError, on_loopback
from btrfs_ublk.image.transport import Answer, NoAnswer, Session

if TYPE_CHECKING:
    from btrfs_ublk.image.logins import Challenge, Login

_HUB, _HUB_HOST = "docker.io", "registry-1.docker.io"
_AGENT = "btrfs-ublk"
#: Of a connection, and of each wait for more bytes.
_TIMEOUT_S = (10.0, 60.0)
#: The same of a cache: another one, or the registry, can be asked.
_CACHE_TIMEOUT_S = (2.0, 10.0)
#: How long a cache is asked again that is only getting it, as csrc/lazy/attempt.c.
_LATER_S, _LATER_PAUSE_S = 6.0, 0.1
#: How long a response may take, and longer by what it has at this rate.
_LONGEST_S, _LEAST_BYTES_PER_S = 60.0, 16 << 10
_MAX_TRIES = 5
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 10.0
#: How long a request may wait because the registry asks for it.
_PATIENCE_S = 60.0
_MAX_REDIRECTIONS = 5
REDIRECTIONS = (301, 302, 303, 307, 308)
#: Too busy, or a gateway whose server is; a later request may succeed.
PASSING = (408, 429, 500, 502, 503, 504)
_MAX_ERROR_BYTES = 16 << 10
_MAX_TOKEN_BYTES = 1 << 20
_TOKEN_DEFAULT_S, _TOKEN_MARGIN_S = 60.0, 30.0
#: A token is renewed sooner by a random part of its life, up to this one: else hosts
#: that begin together would renew theirs together.
_TOKEN_JITTER = 0.1


@contextmanager
def deadline(response: Answer, size_bytes: int) -> Iterator[None]:
    """End an answer of this size when it takes too long. A timeout bounds only the time
    between two bytes, so that a byte now and then would hold us for ever."""
    allowed_s = _LONGEST_S + size_bytes / _LEAST_BYTES_PER_S
    timer = threading.Timer(allowed_s, response.shutdown)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Connection:
    """Requests about one repository of a registry, or of a web server, which has
    ``base`` as its URL. ``actions`` are what a token is to allow, ``pull`` or
    ``pull,push``. ``namespace``: the registry that a mirror is asked about."""

    def __init__(
        self,
        registry: str,
        repository: str,
        access: RegistryAccess,
        *,
        actions: str = "pull",
        base: str | None = None,
        namespace: str | None = None,
        tries: int = _MAX_TRIES,
    ) -> None:
        host = _HUB_HOST if registry == _HUB else registry
        self.place = f"{registry}/{repository}"
        self._registry, self._repository = registry, repository
        self._scopes = [f"repository:{repository}:{actions}"]
        self._access = access
        scheme = "http" if access.insecure else "https"
        self._base = base or f"{scheme}://{host}/v2/"
        self._namespace, self._tries = namespace, tries
        self._found_login: Login | None = None
        #: What is sent with each request once the registry has asked for it.
        self._authorization: str | None = None
        self._until_s = 0.0
        self._challenge: Challenge | None = None
        self._token_is_shared = False
        self._refused_token: str | None = None
        self._renewing = threading.Lock()
        if base is not None and base.startswith("http://") and not access.insecure:
            raise UsageError(
                f"{self.place} is read without TLS, so that anybody between can change "
                "what a tag names",
                hint="write https://; on loopback, --insecure allows it",
            )
        if access.insecure and not on_loopback(self._base):
            raise UsageError(
                f"--insecure is for registries on loopback, not for {registry}",
                hint="--ca-file names a certificate of your own to trust",
            )
        self._caches = access.caches(host) if actions == "pull" and not base else ()
        ca_file = None if access.ca_file is None else str(access.ca_file)
        self._session = Session(_AGENT, ca_file)

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def also(self, scope: str) -> None:
        """Ask for tokens that allow this as well (to mount another's blobs)."""
        if scope not in self._scopes:
            self._scopes.append(scope)
            self._until_s = 0.0

    def url(self, path: str) -> str:
        """Return the URL of ``path`` below the interface's root, or of a Location."""
        url = urljoin(self._base, path)
        if self._namespace is None:
            return url
        return f"{url}{'&' if '?' in url else '?'}ns={self._namespace}"

    def request(
        self,
        method: str,
        path: str,
        *,
        what: str,
        ok: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        tries: int | None = None,
        leave: bool = True,
    ) -> Answer:
        """Send a request until it is answered with one of the statuses ``ok``. The
        caller of a GET reads the body, as a stream, and closes it.

        ``what`` completes "cannot …" in the RegistryError for another answer, or for
        none after ``tries``. Without ``leave``, a redirection to another host is an
        answer, and not followed.
        """

        def ask() -> Answer:
            learned = 0
            while True:
                response = self._follow(method, self.url(path), headers, body, leave)
                # A token that another process got may be of no use.
                most = 2 if self._token_is_shared else 1
                if response.status_code != 401 or learned == most:
                    return response
                learned += 1
                if not self._learn(response):
                    return response
                response.close()

        response = self._insist(what, ask, ok, tries or self._tries)
        if method != "GET":
            # The next request can use the connection of one read to its end.
            with response, suppress(NoAnswer):  # the status says enough
                response.read(_MAX_ERROR_BYTES)
        return response

    def _insist(
        self, what: str, ask: Callable[[], Answer], ok: tuple[int, ...], tries: int
    ) -> Answer:
        """Ask until there is an answer with one of the statuses ``ok``."""
        pause_s = _FIRST_PAUSE_S
        until_s = time.monotonic() + _PATIENCE_S
        tried = 0
        while True:
            tried += 1
            wait_s = pause_s
            try:
                response = ask()
            except NoAnswer as error:
                if tried >= tries or not error.may_pass:
                    raise self._unanswered(what, error) from error
                log.info("%s: %s: try %d failed: %s", self.place, what, tried, error)
            else:
                if response.status_code in ok:
                    return response
                if tried >= tries or response.status_code not in PASSING:
                    self._refused(what, response)
                wait_s = retry_after_s(response.headers.get("Retry-After"), pause_s)
                if time.monotonic() + wait_s > until_s:
                    self._refused(what, response, again_s=wait_s)
                log.info("%s: %s: HTTP %d", self.place, what, response.status_code)
                response.close()
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def caches(self, path: str) -> list[str]:
        """Return the caches to ask for ``path``, in the order that all hosts have."""
        return sorted(
            self._caches,
            key=lambda url: hashlib.sha256(f"{url} {path}".encode()).digest(),
        )

    def ask_cache(
        self, cache: str, path: str, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Ask a cache for what is at ``path``, as the registry would be asked; once,
        and no redirection is followed. The caller reads the body, as a stream, and
        closes it. Where the cache is only getting it (425), it is asked again for some
        seconds. Several threads may do so. Raises NoAnswer."""
        until_s = time.monotonic() + _LATER_S
        parts = urlsplit(self.url(path))
        asked = {"Host": parts.netloc, **(headers or {})}
        while True:
            response = self._session.send(
                "GET",
                cache.rstrip("/") + parts.path,
                headers=self._headers(asked, authorized=True),
                timeout_s=_CACHE_TIMEOUT_S,
            )
            if response.status_code != 425 or time.monotonic() > until_s:
                break
            response.close()
            time.sleep(_LATER_PAUSE_S)
        try:
            self._refuse_encoded(response)
        except RegistryError as error:
            raise NoAnswer(error.message, may_pass=False) from error
        return response

    def _follow(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: bytes | None,
        leave: bool,
    ) -> Answer:
        """Send a request, and follow redirections of those without a body."""
        authorized = _host(url) == _host(self._base)
        sent_by: dict[str, str] = {}
        for _ in range(_MAX_REDIRECTIONS + 1):
            if not url.startswith("https://") and not self._access.insecure:
                raise RegistryError(
                    f"{self.place} sends us to {url}, without TLS",
                    hint="what a registry refers to must have TLS as well",
                )
            response = self._session.send(
                method,
                url,
                headers=self._headers(
                    {**sent_by, **(headers or {})}, authorized=authorized
                ),
                body=body,
                timeout_s=_TIMEOUT_S,
            )
            self._refuse_encoded(response)
            target = response.headers.get("Location")
            if response.status_code not in REDIRECTIONS or not target:
                return response
            if body is not None:
                return response  # an upload is not redirected
            if not leave and _host(urljoin(url, target)) != _host(self._base):
                return response
            response.close()
            # Some stores answer only those who come from their registry.
            sent_by = {"Referer": "{}://{}/".format(*_host(url))}
            url = urljoin(url, target)
            # A token is for the registry, not for the store that it refers to.
            authorized = authorized and _host(url) == _host(self._base)
        raise RegistryError(
            f"{self.place} redirects a request more than {_MAX_REDIRECTIONS} times"
        )

    def _refuse_encoded(self, response: Answer) -> None:
        """Refuse what was compressed for its way: a MiB of it can be more than there is
        memory, before anybody looks at its size."""
        encoding = response.headers.get("Content-Encoding", "").strip()
        if encoding.lower() not in ("", "identity"):
            response.close()
            raise RegistryError(
                f"{self.place} answers with a Content-Encoding of {encoding[:100]!r}, "
                "which it was asked not to use",
                hint="a proxy on the way may do that: ask the registry itself",
            )

    def _headers(
        self, headers: Mapping[str, str], *, authorized: bool
    ) -> dict[str, str]:
        made = {"Accept-Encoding": "identity", **headers}
        if authorized:
            with self._renewing:
                if self._challenge is not None and time.monotonic() >= self._until_s:
                    self._get_token(self._challenge)
            if self._authorization is not None:
                made["Authorization"] = self._authorization
        return made

    def _learn(self, response: Answer) -> bool:
        """Learn from a refusal how the registry wants to be asked."""
        # Many registries want no login.
        from btrfs_ublk.image.logins import basic, parse_challenges

        wanted = parse_challenges(
            response.headers.get("WWW-Authenticate", ""), response.url
        )
        login = self._login
        if login.registry_token is not None:
            self._authorization = f"Bearer {login.registry_token}"
            return True
        if wanted.wants_token:
            if self._challenge is not None and self._authorization:
                self._refused_token = self._authorization.removeprefix("Bearer ")
            self._challenge, self._until_s = wanted, 0.0
            return True
        if wanted.basic and login.user:
            self._authorization = basic(login)
            return True
        return False

    @property
    def _login(self) -> Login:
        if self._found_login is None:
            from btrfs_ublk.image.logins import find_login

            self._found_login = find_login(
                self._registry, self._repository, self._access.docker_config
            )
        return self._found_login

    def _get_token(self, challenge: Challenge) -> None:
        """Get a token, from another process that has one or from the token server."""
        from btrfs_ublk.image.logins import SharedToken

        realm = challenge.realm
        if not realm:
            raise RegistryError(
                f"{self._registry} asks for a token in a way that is not valid"
            )
        if not realm.startswith("https://") and not (
            self._access.insecure and on_loopback(realm)
        ):
            raise RegistryError(
                f"{self._registry} wants its token got without TLS, from {realm!r}"
            )
        login = self._login
        secrets = (login.user, login.password, login.identity_token)
        name, actions = self._scopes[0].rsplit(":", 1)
        shared = SharedToken(
            [
                *(self._registry, urlsplit(self._base).scheme),
                *(actions, name.partition(":")[2]),
                *(text or "" for text in secrets),
                *self._scopes[1:],
            ]
        )

        class _Shared(Exception):
            """Another process has got one meanwhile."""

        def ask() -> Answer:
            if found := shared.find(refused=self._refused_token):
                self._authorization, self._until_s = f"Bearer {found[0]}", found[1]
                self._token_is_shared = True
                raise _Shared
            try:
                response = self._ask_for_token(realm, challenge, login)
            except NoAnswer:
                shared.tell(None)
                raise
            if response.status_code != 200:
                shared.tell(None)
            return response

        try:
            response = self._insist("get a token", ask, (200,), _MAX_TRIES)
        except _Shared:
            return
        token = None
        try:
            with response, deadline(response, 0):
                self._refuse_encoded(response)
                token = self._take_token(response)
        finally:
            shared.tell(token, self._until_s)

    def _ask_for_token(self, realm: str, challenge: Challenge, login: Login) -> Answer:
        from btrfs_ublk.image.logins import basic

        # NB: what the registry asks for is about one request, and ours about all.
        asked: dict[str, Any] = {"service": challenge.service or ""}
        if login.identity_token:
            asked |= {
                "grant_type": "refresh_token",
                "client_id": _AGENT,
                "refresh_token": login.identity_token,
                "scope": " ".join(self._scopes),
            }
            return self._session.send(
                "POST",
                realm,
                headers={"Content-Type": "application/x-www-form-urlencoded"},
                body=urlencode(asked).encode(),
                timeout_s=_TIMEOUT_S,
            )
        query = urlencode(asked | {"scope": self._scopes}, doseq=True)
        return self._session.send(
            "GET",
            f"{realm}{'&' if '?' in realm else '?'}{query}",
            headers={"Authorization": basic(login)} if login.user else {},
            timeout_s=_TIMEOUT_S,
        )

    def _take_token(self, response: Answer) -> str:
        from btrfs_ublk.image.logins import TOKEN_MAX_S

        began_s = time.monotonic()
        try:
            data = response.read(_MAX_TOKEN_BYTES)
            found = json.loads(data) if len(data) < _MAX_TOKEN_BYTES else {}
        except (ValueError, RecursionError, NoAnswer):
            found = {}
        if not isinstance(found, dict):
            found = {}
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not token.isprintable() or " " in token:
            raise RegistryError(
                f"the token server of {self._registry} answers without a token"
            )
        life_s = found.get("expires_in")
        if not isinstance(life_s, int) or life_s <= 0:
            life_s = _TOKEN_DEFAULT_S
        life_s = min(life_s, TOKEN_MAX_S)
        # NB: servers send it a little longer; see login_publish() in C.
        good_s = life_s - min(_TOKEN_MARGIN_S, life_s / 4)
        self._until_s = began_s + good_s * (1 - random.uniform(0, _TOKEN_JITTER))
        self._authorization = f"Bearer {token}"
        self._token_is_shared = False
        return token

    def _unanswered(self, what: str, error: NoAnswer) -> RegistryError:
        reason = error.reason
        if "WRONG_VERSION_NUMBER" in reason:
            reason = "it speaks http, not https"
            hint = "--insecure (loopback only)"
        elif error.is_tls:
            hint = "--ca-file names a certificate to trust; --insecure is for loopback"
        else:
            hint = "is the registry there, and its name right?"
            if self._registry != "localhost" and not set(".:") & set(self._registry):
                hint += " Names of Docker Hub's images begin with docker.io/"
        return RegistryError(f"{self.place}: cannot {what}: {reason}", hint=hint)

    def _refused(
        self, what: str, response: Answer, *, again_s: float | None = None
    ) -> NoReturn:
        status = response.status_code
        with response:
            why = _error_text(response)
        hint = {
            401: f"log in: docker login {self._registry}; or name the file with the "
            "login: --docker-config",
            403: "the login may not do that: ask who owns the repository",
            404: "is the name right? Some registries answer so without a login, too",
            429: "the registry limits requests: try later, or log in",
        }.get(status)
        if status == 401 and self._login.absent:
            hint = f"install {self._login.absent}, which may have the login; or {hint}"
        if status >= 500:
            hint = "the registry fails: try later"
        if again_s is not None:
            hint = (
                f"the registry wants to be asked again in {again_s:.0f} s, not sooner"
            )
        raise RegistryError(
            f"{self.place}: cannot {what}: HTTP {status}{why}", hint=hint, status=status
        )


def _host(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def retry_after_s(text: str | None, usual_s: float) -> float:
    """Return how long the header Retry-After has one wait: seconds, or until a date
    (RFC 9110, 10.2.3)."""
    text = (text or "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    from email.utils import parsedate_to_datetime

    try:
        at = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError, IndexError):
        return usual_s
    wait_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp() - time.time()
    return wait_s if wait_s > 0 else usual_s


def _error_text(response: Answer) -> str:
    """Return what the registry says of its refusal."""
    try:
        body = response.read(_MAX_ERROR_BYTES)
    except NoAnswer:  # the status says enough
        return ""
    found = re.search(rb'"code"\s*:\s*"([^"]*)"', body)
    message = re.search(rb'"message"\s*:\s*"([^"]*)"', body)
    said = [x[1].decode(errors="replace") for x in (found, message) if x]
    shown = ": ".join(x for x in said if x.isprintable())[:200]
    return f" ({shown})" if shown else ""
