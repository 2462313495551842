"""A registry on loopback."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from support.processes import ending_with_us, stop

from btrfs_ublk.base.capabilities import Program

REGISTRY = Program("docker-registry", package="docker-registry")
SERVICE = "registry of the tests"
ISSUER = "tokens of the tests"
USER, PASSWORD = "puller", "p4ssw0rd"
IDENTITY_TOKEN = "1dent1ty"
#: How long the registry accepts expired tokens, as clocks may differ.
LEEWAY_S = 60
START_TIMEOUT_S = 60
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"

_CONFIGURATION = """
version: 0.1
log: {{level: info, formatter: json}}
storage:
  filesystem: {{rootdirectory: {root}/storage}}
http:
  secret: none
"""

_TLS = """
  tls: {{certificate: {root}/tls.pem, key: {root}/tls.key}}
"""

_AUTH = """
auth:
  token:
    realm: {realm}
    service: {service}
    issuer: {issuer}
    rootcertbundle: {root}/tokens.pem
"""


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class TokenServer:
    """Hands out tokens. Its fields may be changed at any time."""

    issued: trustme.LeafCert
    port: int = 0
    anonymous: bool = False  #: give tokens also without a password
    expires_in_s: int = 300  #: lifetime according to answers
    life_s: float = 300.0  #: real lifetime of tokens
    requests: list[str] = field(default_factory=list)
    passwords: list[str] = field(default_factory=lambda: [PASSWORD])

    @property
    def realm(self) -> str:
        return f"http://127.0.0.1:{self.port}/token?account=tests"

    def token(self, *scopes: str) -> str:
        """Return a JSON Web Token, of the form in the registry's documentation."""
        parts = [scope.split(":") for scope in scopes]
        now = int(time.time())
        certificate = self.issued.cert_chain_pems[0].bytes()
        der = b"".join(certificate.split(b"-----")[2].split())
        header = {"typ": "JWT", "alg": "RS256", "x5c": [der.decode()]}
        claims = {
            "iss": ISSUER,
            "sub": USER,
            "aud": SERVICE,
            "exp": int(now + self.life_s - LEEWAY_S),
            "nbf": now - 600,
            "iat": now,
            "jti": str(time.monotonic_ns()),
            "access": [
                {"type": kind, "name": name, "actions": actions.split(",")}
                for kind, name, actions in parts
            ],
        }
        signed = ".".join(_base64url(json.dumps(x).encode()) for x in (header, claims))
        key = serialization.load_pem_private_key(
            self.issued.private_key_pem.bytes(), password=None
        )
        assert isinstance(key, rsa.RSAPrivateKey)
        signature = key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{_base64url(signature)}"

    def answer(self, query: str, authorization: str | None) -> dict[str, object] | None:
        """Return the answer to a request's query or form; None: refuse it."""
        self.requests.append(query)
        given = parse_qs(query)
        asked = {key: values[0] for key, values in given.items()}
        logins = [f"{USER}:{password}".encode() for password in self.passwords]
        right = [f"Basic {base64.b64encode(login).decode()}" for login in logins]
        refreshed = asked.get("refresh_token") == IDENTITY_TOKEN
        known = refreshed or authorization in right
        if asked.get("service") != SERVICE or not (known or self.anonymous):
            return None
        name = "access_token" if refreshed else "token"
        scopes = [one for value in given.get("scope", []) for one in value.split()]
        return {name: self.token(*scopes), "expires_in": self.expires_in_s}


@contextmanager
def _token_server(root: Path) -> Iterator[TokenServer]:
    ca = trustme.CA(key_type=trustme.KeyType.RSA)
    ca.cert_pem.write_to_path(root / "tokens.pem")
    server = TokenServer(ca.issue_cert("localhost", key_type=trustme.KeyType.RSA))

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, query: str) -> None:
            answer = server.answer(query, self.headers["Authorization"])
            body = json.dumps(answer).encode()
            self.send_response(401 if answer is None else 200)
            self.send_header("Content-Length", str(len(body)))
            with suppress(ConnectionError):  # a client that was killed
                self.end_headers()
                self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(urlsplit(self.path).query)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._answer(self.rfile.read(length).decode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        server.port = listener.server_address[1]
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()


@dataclass(frozen=True)
class Registry:
    """A running registry, and its token server. ``ca_file`` is for one with TLS, and
    ``log`` has what it says."""

    process: _Process
    tokens: TokenServer
    ca_file: Path

    @property
    def log(self) -> Sequence[bytes]:
        return self.process.log

    @property
    def port(self) -> int:
        return self.process.port

    def restart(self, *, away_s: float) -> None:
        """Kill it, and start it again after a while. NB: it ends with the thread that
        calls this."""
        self.process.restart(away_s=away_s)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def downloads(self, *digests: str) -> int:
        """Return how many requests for these blobs were answered until now."""
        answered = (json.loads(x) for x in list(self.log) if b'"GET"' in x)
        return sum(
            one["http.request.uri"].rpartition("/blobs/")[2] in digests
            for one in answered
            if one["msg"] == "response completed"
        )

    def _connection(self) -> http.client.HTTPConnection:
        if not self.ca_file.exists():
            return http.client.HTTPConnection(self.host, timeout=30)
        context = ssl.create_default_context(cafile=self.ca_file)
        return http.client.HTTPSConnection(self.host, timeout=30, context=context)

    def push(self, repository: str, data: bytes) -> str:
        """Push a blob, and return its digest."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        token = self.tokens.token(f"repository:{repository}:pull,push")
        headers = {"Authorization": f"Bearer {token}"}
        connection = self._connection()
        connection.request("POST", f"/v2/{repository}/blobs/uploads/", headers=headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 202, response.status
        there = urlsplit(response.headers["Location"])
        target = f"{there.path}?{there.query}&digest={digest}"
        connection.request("PUT", target, body=data, headers=headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 201, response.status
        connection.close()
        return digest

    def push_manifest(
        self, repository: str, name: str | None, manifest: dict[str, object]
    ) -> str:
        """Push a manifest, tagged ``name`` if that is not None; return its digest."""
        body = json.dumps(manifest).encode()
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        token = self.tokens.token(f"repository:{repository}:pull,push")
        headers = {"Authorization": f"Bearer {token}"}
        headers["Content-Type"] = str(manifest["mediaType"])
        connection = http.client.HTTPConnection(self.host, timeout=30)
        there = f"/v2/{repository}/manifests/{name or digest}"
        connection.request("PUT", there, body=body, headers=headers)
        response = connection.getresponse()
        assert response.status == 201, response.read()
        connection.close()
        return digest

    def push_image(self, repository: str, name: str | None, *layers: bytes) -> str:
        """Push an image of these layers, as they are; return the manifest's digest."""
        described = [
            {
                "mediaType": kind,
                "digest": self.push(repository, data),
                "size": len(data),
            }
            for kind, data in [
                ("application/vnd.oci.image.config.v1+json", b"{}"),
                *(("application/vnd.oci.image.layer.v1.tar", x) for x in layers),
            ]
        ]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described[0]}
        return self.push_manifest(
            repository, name, {**manifest, "layers": described[1:]}
        )


class _Process:
    """A registry's process. One that is started again has the port that it had."""

    def __init__(self, configuration: Path) -> None:
        self._configuration = configuration
        self.port = 0  # any
        self.log: list[bytes] = []
        self.start()

    def start(self) -> None:
        address = f"127.0.0.1:{self.port}"
        self._process = subprocess.Popen(
            ending_with_us([REGISTRY.name, "serve", self._configuration]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={
                "PATH": "/usr/bin",
                "OTEL_TRACES_EXPORTER": "none",
                "REGISTRY_HTTP_ADDR": address,
            },
        )
        late = threading.Timer(START_TIMEOUT_S, self._process.kill)
        late.start()
        try:
            self.port = _wait_for_port(self._process)
        except BaseException:
            stop(self._process)
            raise
        finally:
            late.cancel()
            late.join()
        assert self._process.stderr
        # Read its later messages. Otherwise it would wait when the pipe is full.
        self._drain = threading.Thread(
            target=self.log.extend, args=(self._process.stderr,)
        )
        self._drain.start()

    def stop(self) -> None:
        self._process.terminate()
        self._drain.join()
        stop(self._process)

    def restart(self, *, away_s: float) -> None:
        self._process.kill()
        self._drain.join()
        self._process.communicate()
        time.sleep(away_s)
        self.start()


def _wait_for_port(process: subprocess.Popen[bytes]) -> int:
    assert process.stderr
    for line in process.stderr:
        found = re.search(rb"listening on 127\.0\.0\.1:([0-9]+)", line)
        if found:
            return int(found.group(1))
    raise AssertionError("the registry has ended")


def registry_fixture(*, tls: bool = False) -> Any:
    """Make a fixture of one registry for all tests of a module."""

    @pytest.fixture(scope="module")
    def registry(
        need: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Registry]:
        need(REGISTRY)
        with registry_server(tmp_path_factory.mktemp("registry"), tls=tls) as server:
            yield server

    return registry


def certify(root: Path) -> None:
    """Write a new authority, ``root``/ca.pem, and a certificate of it, for a registry
    that starts then."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(root / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(root / "tls.key")
    issued.cert_chain_pems[0].write_to_path(root / "tls.pem")


@contextmanager
def registry_server(
    root: Path, *, tls: bool = False, realm: str | None = None
) -> Iterator[Registry]:
    """Run a registry with its storage under ``root``. With ``tls``, it has a
    certificate of an authority ``root``/ca.pem, and wants no tokens. ``realm`` is where
    clients find the token server, if something is in front of it."""
    with ExitStack() as stack:
        tokens = stack.enter_context(_token_server(root))
        configuration = root / "registry.yml"
        if tls:
            certify(root)
        parts = _CONFIGURATION.rstrip() + (_TLS.rstrip() if tls else _AUTH)
        configuration.write_text(
            parts.format(
                root=root, realm=realm or tokens.realm, service=SERVICE, issuer=ISSUER
            ),
            encoding="utf-8",
        )
        process = _Process(configuration)
        stack.callback(process.stop)
        yield Registry(process, tokens=tokens, ca_file=root / "ca.pem")
