"""Runs nginx as a real file server, on loopback, with a certificate of the test."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme
from support.stopping import ending_with_us, stop

from btrfs_ublk.base.capabilities import Program

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
