"""Web servers: nginx, one of a test's own bytes, and one with an origin's behaviour."""

import hashlib
import os
import random
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme
from support.processes import ending_with_us, stop

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.units import KIB

#: Gets the head of a request, and returns an answer, as bytes or as pieces of them.
Script = Callable[[str], bytes | Iterable[bytes]]


@dataclass
class ScriptedServer:
    """A server; ``script`` may be changed at any time, ``requests`` lists all heads."""

    port: int
    script: Script
    requests: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"

    def url(self, path: str = "object") -> str:
        return f"http://{self.host}:{self.port}/{path}"


def response(head: str, body: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a response whose Content-Length is ``length``, or the body's size."""
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {head.splitlines()[0]}", *head.splitlines()[1:]]
    lines += [f"Content-Length: {size}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


def range_of(request: str) -> tuple[int, int]:
    """Return the first and the last byte that a request asks for."""
    found = re.search(r"(?im)^range: bytes=(\d+)-(\d+)", request)
    assert found, request
    return int(found[1]), int(found[2])


def ranged(request: str, data: bytes, head: str = "") -> bytes:
    """Return the right answer to a request for a range of data. ``head`` has more lines
    of its head."""
    first, last = range_of(request)
    last = min(last, len(data) - 1)
    lines = f"206 Partial Content\nContent-Range: bytes {first}-{last}/{len(data)}"
    return response(f"{lines}\n{head}".rstrip(), data[first : last + 1])


def _answer(server: ScriptedServer, client: socket.socket) -> None:
    request = b""
    client.settimeout(10)
    with client, suppress(OSError):
        while b"\r\n\r\n" not in request:
            more = client.recv(65536)
            if not more:
                return
            request += more
        text = request.decode("latin-1")
        server.requests.append(text)
        answer = server.script(text)
        for piece in [answer] if isinstance(answer, bytes) else answer:
            client.sendall(piece)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):  # otherwise unread data would cause a reset
            pass


@contextmanager
def scripted_server(
    script: Script, host: str = "127.0.0.1"
) -> Iterator[ScriptedServer]:
    """Run a server that gives one answer per connection."""
    with socket.create_server((host, 0), backlog=64) as listener:
        port = listener.getsockname()[1]
        server = ScriptedServer(port=port, script=script, host=host)
        threads: list[threading.Thread] = []

        def accept() -> None:
            with suppress(OSError):  # the listener was shut down
                while True:
                    client, _ = listener.accept()
                    thread = threading.Thread(target=_answer, args=(server, client))
                    thread.start()
                    threads.append(thread)

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield server
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()


ORIGIN_UNIT = 64 * KIB
ORIGIN_UNITS = 64
ORIGIN_BYTES = ORIGIN_UNITS * ORIGIN_UNIT
ORIGIN_DATA = random.Random(4).randbytes(ORIGIN_BYTES)


class Origin:
    """DATA by ranges, after ``delay_s``; ``bad`` units are not to be had, and those
    below ``held_units`` come only once ``go_on`` is set.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.held_units = 0
        self.go_on = threading.Event()
        self.bad: set[int] = set()
        self.asked: list[int] = []  # units
        self.requests = 0

    def __call__(self, request: str) -> bytes:
        first, last = range_of(request)
        units = range(first // ORIGIN_UNIT, last // ORIGIN_UNIT + 1)
        self.asked.extend(units)
        self.requests += 1
        if first // ORIGIN_UNIT < self.held_units:
            self.go_on.wait()
        time.sleep(self.delay_s)
        if self.bad.intersection(units):
            return response("404 Not Found")
        return ranged(request, ORIGIN_DATA, 'ETag: "one"')


def origin_source(url: str) -> dict[str, Any]:
    units = [
        ORIGIN_DATA[at : at + ORIGIN_UNIT] for at in range(0, ORIGIN_BYTES, ORIGIN_UNIT)
    ]
    digests = [hashlib.sha256(unit).hexdigest() for unit in units]
    return {
        "kind": "http",
        "url": url,
        "size": ORIGIN_BYTES,
        "unit": ORIGIN_UNIT,
        "digests": digests,
    }


NGINX = Program("nginx", package="nginx")

# All locations serve the same files, each in its own way.
_CONFIGURATION = """
daemon off;
# NB: without a master, it crashes on inherited sockets.
user root;
worker_processes 1;
pid {root}/nginx.pid;
error_log {root}/error.log warn;
worker_rlimit_nofile 4096;
events {{ worker_connections 1024; }}
http {{
    log_format served '$server_protocol $status $connection $http_range $uri';
    access_log {root}/access.log served;
    client_body_temp_path {root}/tmp;
    proxy_temp_path {root}/tmp;
    fastcgi_temp_path {root}/tmp;
    uwsgi_temp_path {root}/tmp;
    scgi_temp_path {root}/tmp;
    keepalive_requests 1000000;
    default_type application/octet-stream;
    server {{
        listen 127.0.0.1:{port};
        listen 127.0.0.1:{tls_port} ssl http2;
        ssl_certificate {root}/server.pem;
        ssl_certificate_key {root}/server.pem;
        ssl_client_certificate {root}/ca.pem;
        ssl_verify_client optional;
        location /files/ {{ alias {root}/files/; }}
        location /whole/ {{ alias {root}/files/; max_ranges 0; }}
        location /weak/ {{ alias {root}/files/; etag off; }}
        location /anonymous/ {{
            alias {root}/files/; etag off; add_header Last-Modified "";
        }}
        location /coded/ {{ alias {root}/files/; add_header Content-Encoding gzip; }}
        location /coded-whole/ {{
            alias {root}/files/; max_ranges 0; add_header Content-Encoding gzip;
        }}
        location /slow/ {{ alias {root}/files/; limit_rate 2k; }}
        location /basic/ {{
            alias {root}/files/;
            auth_basic test; auth_basic_user_file {root}/htpasswd;
        }}
        location /mutual/ {{
            alias {root}/files/;
            if ($ssl_client_verify != SUCCESS) {{ return 403; }}
        }}
        location /busy {{ add_header Retry-After 7 always; return 503; }}
        location /limited {{ add_header Retry-After 3 always; return 429; }}
        location /broken {{ return 500; }}
        location /loop {{ return 302 /loop; }}
        location /moved/ {{ rewrite ^/moved/(.*)$ /files/$1 redirect; }}
        location /to-tls/ {{
            rewrite ^/to-tls/(.*)$ https://localhost:{tls_port}/files/$1 redirect;
        }}
        location /to-plain/ {{
            rewrite ^/to-plain/(.*)$ http://localhost:{port}/files/$1 redirect;
        }}
        location /to-file {{ return 302 file:///etc/hostname; }}
    }}
}}
"""


@dataclass(frozen=True)
class WebServer:
    """A running server of the directory ``files``."""

    root: Path
    port: int
    tls_port: int

    @property
    def files(self) -> Path:
        return self.root / "files"

    @property
    def ca(self) -> Path:
        """Path of the certificate that clients have to trust."""
        return self.root / "ca.pem"

    @property
    def client(self) -> Path:
        """Path of certificate and key of a client that the server accepts."""
        return self.root / "client.pem"

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def tls_url(self, path: str) -> str:
        return f"https://localhost:{self.tls_port}/{path}"

    def served(self) -> list[dict[str, str]]:
        """Return all requests so far, in order."""
        names = ("protocol", "status", "connection", "range", "path")
        lines = (self.root / "access.log").read_text(encoding="utf-8").splitlines()
        return [dict(zip(names, line.split(" "), strict=True)) for line in lines]


def _write_certificates(root: Path) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(root / "ca.pem")
    for name in ("server", "client"):
        issued = ca.issue_cert("localhost", "127.0.0.1")
        path = root / f"{name}.pem"
        path.touch(mode=0o600)
        issued.private_key_and_cert_chain_pem.write_to_path(path)


@contextmanager
def web_server(root: Path) -> Iterator[WebServer]:
    """Serve ``root / "files"``. Both sockets are bound here, and inherited as when
    nginx is upgraded, so that connections succeed from the start.
    """
    for directory in (root, root / "files", root / "tmp"):
        directory.mkdir(exist_ok=True)
    _write_certificates(root)
    (root / "access.log").touch()  # nginx may be asked before it has begun
    (root / "htpasswd").write_text("reader:{PLAIN}s3cret\n", encoding="utf-8")
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
            for _ in range(2)
        ]
        port, tls_port = (each.getsockname()[1] for each in sockets)
        (root / "nginx.conf").write_text(
            _CONFIGURATION.format(root=root, port=port, tls_port=tls_port),
            encoding="utf-8",
        )
        descriptors = [each.fileno() for each in sockets]
        errors = stack.enter_context((root / "error.log").open("wb"))
        process = subprocess.Popen(
            ending_with_us(
                ["nginx", "-e", root / "error.log", "-c", root / "nginx.conf"]
            ),
            env=os.environ | {"NGINX": "".join(f"{fd};" for fd in descriptors)},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        stack.callback(stop, process)
        yield WebServer(root=root, port=port, tls_port=tls_port)
        assert process.poll() is None, (root / "error.log").read_text(encoding="utf-8")
