"""HTTP/1.1 for the registry's protocol, on Python's own http.client: connections that
are used again, TLS, proxies of the environment, and answers that are read in parts.

It loads in a fifth of the time that the package ``requests`` takes, which is what a
command that starts an image has until its first request.
"""

from __future__ import annotations

import http.client
import os
import re
import select
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from email.message import Message
from urllib.parse import quote, unquote, urlsplit

from btrfs_ublk.base.urls import shown_text
from btrfs_ublk.errors import UsageError

#: Of a URL, what others have left unquoted, or have quoted already.
_SAFE = "!#$%&'()*+,/:;=?@[]~"
_BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
#: Connections that wait for the next request, of each server.
_IDLE = 16
_LINK = re.compile(r'<([^>]*)>[^,]*?;\s*rel="?next"?')


#: How a connection ends beneath TLS.
_TLS_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


class NoAnswer(Exception):
    """A request has no answer, or not all of one. ``may_pass``: a later one may have;
    ``is_tls``: the server could not be trusted."""

    def __init__(
        self, reason: str, *, may_pass: bool = True, is_tls: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason, self.may_pass, self.is_tls = reason, may_pass, is_tls

    @classmethod
    def of(cls, error: Exception) -> NoAnswer:
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = f"its certificate is not valid: {error.verify_message}"
            return cls(reason, may_pass=False, is_tls=True)
        if isinstance(error, ssl.SSLError) and not isinstance(error, _TLS_ENDS):
            return cls(str(error), may_pass=False, is_tls=True)
        if isinstance(error, OSError):
            return cls(error.strerror or str(error) or type(error).__name__)
        passing = not isinstance(error, (http.client.InvalidURL, ValueError))
        return cls(str(error) or type(error).__name__, may_pass=passing)


#: What http.client and the modules below it raise; it says ValueError for URLs.
_ERRORS = (OSError, http.client.HTTPException, ValueError)
_Server = tuple[str, str, int]


class Answer:
    """The head of an answer; its body is read once, in parts. Closing it, or reading it
    to its end, lets go of the connection."""

    def __init__(
        self,
        session: Session,
        server: _Server,
        connection: http.client.HTTPConnection,
        sock: socket.socket | None,
        url: str,
    ) -> None:
        response = connection.getresponse()
        self.status_code, self.url = response.status, url
        self.headers = _headers(response)
        self._session, self._server = session, server
        self._connection: http.client.HTTPConnection | None = connection
        self._response = response
        self._socket, self._is_cut = sock, False

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._response.isclosed() and not self._response.will_close:
            self._session.give_back(self._server, connection)
        else:
            self._response.close()
            connection.close()

    def shutdown(self) -> None:
        """End what is being read, from another thread."""
        self._is_cut = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RD)

    def iter_content(self, part_bytes: int) -> Iterator[bytes]:
        """Yield the body in parts of at most so many bytes. Raises NoAnswer."""
        response = self._response
        while not response.isclosed():
            try:
                part = response.read1(part_bytes)
            except _ERRORS as error:
                self.close()
                raise NoAnswer.of(error) from error
            if self._is_cut:
                self.close()
                raise NoAnswer("it takes too long")
            if part:
                yield part
            elif response.length:
                missing = response.length
                self.close()
                raise NoAnswer(f"it ends {missing} bytes too early")
            elif not response.isclosed():
                response.close()
        self.close()

    def read(self, most_bytes: int) -> bytes:
        """Return the body, or its beginning. Raises NoAnswer."""
        data = b""
        for part in self.iter_content(most_bytes):
            data += part
            if len(data) >= most_bytes:
                break
        return data[:most_bytes]

    @property
    def next_link(self) -> str | None:
        """The URL of the next page (RFC 8288)."""
        found = _LINK.search(self.headers.get("Link", ""))
        return found[1] if found else None


def _headers(response: http.client.HTTPResponse) -> Message[str, str]:
    """Return headers by their names, in any case. What came several times is joined."""
    made: Message[str, str] = Message()
    for name in {name.lower() for name in response.headers}:
        made[name] = ", ".join(response.headers.get_all(name, []))
    return made


class Session:
    """Connections to servers; several threads may use them. ``ca_file`` names
    certificates to trust instead of the system's."""

    def __init__(self, agent: str, ca_file: str | None = None) -> None:
        self._agent, self._ca_file = agent, ca_file
        self._idle: dict[_Server, list[http.client.HTTPConnection]] = {}
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def give_back(
        self, server: _Server, connection: http.client.HTTPConnection
    ) -> None:
        """Keep a connection for the next request."""
        with self._lock:
            idle = self._idle.setdefault(server, [])
            if len(idle) < _IDLE:
                idle.append(connection)
                return
        connection.close()

    def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | Iterable[bytes] | None = None,
        timeout_s: tuple[float, float],
    ) -> Answer:
        """Send a request; return the answer, whatever its status. ``timeout_s`` is that
        of connecting, and of each wait for more. Raises NoAnswer."""
        try:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{shown_text(url)[:200]!r} is no URL of a web server")
            port = parts.port or (443 if parts.scheme == "https" else 80)
            server = (parts.scheme, parts.hostname, port)
            target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
            if target.startswith("?"):
                target = f"/{target}"
            target = quote(target, _SAFE)
            proxy = _proxy_of(parts.scheme, parts.hostname, port)
            given = {"User-Agent": self._agent, **headers}
            if proxy is not None and parts.scheme == "http":
                target = f"http://{parts.netloc.rpartition('@')[2]}{target}"
                given |= _proxy_login(proxy)
            while True:
                connection = self._taken(server)
                used = connection is not None
                if connection is None:
                    connection = self._connection(server, proxy, timeout_s[0])
                try:
                    if connection.sock is not None:
                        connection.sock.settimeout(timeout_s[1])
                    _request(connection, method, target, body, given)
                    # NB: it forgets the socket of what is the last on a connection.
                    return Answer(self, server, connection, connection.sock, url)
                except BaseException as error:
                    connection.close()
                    # The server may have closed it at that moment.
                    ended = isinstance(error, (ConnectionError, *_TLS_ENDS))
                    if used and ended and body is None:
                        continue
                    raise
        except _ERRORS as error:
            raise NoAnswer.of(error) from error

    def _taken(self, server: _Server) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                idle = self._idle.get(server)
                if not idle:
                    return None
                connection = idle.pop()
            # What can be read before a request is the end.
            if connection.sock and not _is_readable(connection.sock):
                return connection
            connection.close()

    def _connection(
        self, server: _Server, proxy: str | None, timeout_s: float
    ) -> http.client.HTTPConnection:
        scheme, host, port = server
        at = urlsplit(proxy) if proxy else None
        where = (host, port) if at is None else (at.hostname or "", at.port or 80)
        made: http.client.HTTPConnection
        if scheme == "https":
            with self._lock:
                self._tls = self._tls or _context(self._ca_file)
            made = http.client.HTTPSConnection(
                *where, timeout=timeout_s, context=self._tls
            )
            if proxy is not None:
                made.set_tunnel(host, port, _proxy_login(proxy))
        else:
            made = http.client.HTTPConnection(*where, timeout=timeout_s)
        made.connect()
        return made


def _request(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: bytes | Iterable[bytes] | None,
    headers: Mapping[str, str],
) -> None:
    try:
        connection.request(method, target, body, headers)
    except (BrokenPipeError, ConnectionResetError):
        # A server that does not want a large body answers and closes, so that its
        # answer may be there. The rest of the body cannot follow on this connection.
        if not body or connection.sock is None or not _is_readable(connection.sock):
            raise


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _context(ca_file: str | None) -> ssl.SSLContext:
    """Raises UsageError for certificates that cannot be read."""
    given = (("--ca-file", ca_file), *((x, os.environ.get(x)) for x in _BUNDLES))
    name, path = next((x for x in given if x[1]), ("", None))
    try:
        if path is not None and os.path.isdir(path):
            return ssl.create_default_context(capath=path)
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise UsageError(
            f"{name} {path}: no certificates can be read there: {error.strerror}",
            hint="name a file of certificates (PEM), or leave it out",
        ) from error


def _proxy_of(scheme: str, host: str, port: int) -> str | None:
    """Return the URL of the proxy that the environment names for a server."""
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    # NB: it takes as long to load as all of this.
    from urllib.request import getproxies_environment, proxy_bypass

    found = getproxies_environment()
    if proxy_bypass(f"{host}:{port}") or _is_bypassed(host, found):
        return None
    proxy = found.get(scheme) or found.get("all")
    if proxy is None or "://" not in proxy:
        return proxy and f"http://{proxy}"
    if not proxy.startswith("http://"):
        kind = proxy.partition(":")[0]
        raise ValueError(f"the environment names a proxy of the kind {kind}, not http")
    return proxy


def _is_bypassed(host: str, proxies: Mapping[str, str]) -> bool:
    """Whether no_proxy has a network, which urllib does not know, with this address."""
    import ipaddress

    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        for each in proxies.get("no", "").split(","):
            with suppress(ValueError):
                if address in ipaddress.ip_network(each.strip(), strict=False):
                    return True
    return False


def _proxy_login(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    if not parts.username:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
